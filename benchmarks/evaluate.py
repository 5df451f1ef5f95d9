"""Speed of the model: compile times, candidates per second, memory. Run: `python benchmarks/evaluate.py [STUDY]`.

Reported, never asserted: machines differ and are shared. Medians over several passes; every pass evaluates the same
blocks of the study's space through one jitted `evaluate`, everything on the default device.
"""

import resource
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from breakeven.models.attainment import attain
from breakeven.models.performance import performance
from breakeven.models.serving import evaluate
from breakeven.models.tables import Resolved, resolve
from breakeven.optimizer.evaluator import BLOCK
from breakeven.studies.study import Study

PASSES, BLOCKS = 7, 12


def main() -> None:
    """Print the table."""
    path = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "studies" / "coding-agent.yaml"
    study = Study.load(path)
    space, inputs = study.space, (study.workload, study.slo, study.catalog)
    starts = np.linspace(0, space.size - BLOCK, BLOCKS).astype(np.int64)
    blocks = [space.deployment(np.arange(s, s + BLOCK)) for s in starts]

    clock = time.perf_counter()
    jax.block_until_ready(evaluate(blocks[0], *inputs))
    first_s = time.perf_counter() - clock

    rates = []
    for _ in range(PASSES):
        clock = time.perf_counter()
        done = [evaluate(block, *inputs) for block in blocks]
        jax.block_until_ready(done)
        rates.append(BLOCKS * BLOCK / (time.perf_counter() - clock))

    def mean_attainment(resolved: Resolved) -> jax.Array:
        found = performance(resolved, study.workload, study.catalog)
        return jnp.mean(attain(found.latency, study.slo).slo)

    resolved = resolve(blocks[0], study.catalog)
    gradient = jax.jit(jax.grad(mean_attainment, allow_int=True))
    clock = time.perf_counter()
    jax.block_until_ready(gradient(resolved))
    gradient_s = time.perf_counter() - clock
    clock = time.perf_counter()
    jax.block_until_ready(gradient(resolved))
    gradient_rate = BLOCK / (time.perf_counter() - clock)

    print(f"device                          {jax.devices()[0]}, jax {jax.__version__}")
    print(f"study                           {study.written.name}: {space.size:,} candidates")
    print(f"first call (compile + 1 block)  {first_s:.1f} s")
    middle, low, high = statistics.median(rates), min(rates), max(rates)
    print(f"candidates per second           {middle:,.0f}  (min {low:,.0f}, max {high:,.0f})")
    print(f"gradient, first call            {gradient_s:.1f} s")
    print(f"gradients per second            {gradient_rate:,.0f}")
    print(f"peak memory                     {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f} MB")


if __name__ == "__main__":
    main()
