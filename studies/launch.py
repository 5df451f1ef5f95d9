"""Launch commands of vLLM and SGLang: a shell script per pool, and one for the router before them."""

import json
import math
import shlex
from collections.abc import Mapping

from breakeven.models.catalog import table
from breakeven.studies.plan import Plan, PoolPlan

Options = list[tuple[str, str | None]]

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
KV_DTYPES = {
    "vllm": {"bf16": "auto", "fp8": "fp8"},
    "sglang": {"bf16": "auto", "fp8": "fp8_e4m3", "fp4": "fp4_e2m1"},
}
_HEAD = """#!/usr/bin/env bash
# {what}
# Written by breakeven for: {title}. NOTES.md says what differs from it.
set -euo pipefail
"""


def checked(engine: str, options: Options) -> Options:
    """The options, all of which the engine documents (engine_options.toml); KeyError is a fault of ours."""
    known = table("engine_options")[engine]["options"]
    for name, _ in options:
        if name not in known:
            raise KeyError(f"{engine} documents no option {name}")
    return options


def vllm_options(plan: Plan, pool: PoolPlan) -> Options:
    """What `vllm serve` is given for an engine of a pool, network addresses apart."""
    options: Options = [("--tensor-parallel-size", str(pool.tensor_parallel))]
    if pool.pipeline_parallel > 1:
        options.append(("--pipeline-parallel-size", str(pool.pipeline_parallel)))
    if pool.context_parallel > 1:
        options.append(("--prefill-context-parallel-size", str(pool.context_parallel)))
    if pool.data_parallel > 1:
        options.append(("--data-parallel-size", str(pool.data_parallel)))
    if pool.expert_parallel:
        options.append(("--enable-expert-parallel", None))
    if plan.overlaps(pool):
        options.append(("--enable-dbo", None))
    if pool.role != "prefill":
        options.append(("--max-num-seqs", str(math.ceil(pool.max_batch / pool.data_parallel))))
    if pool.role != "decode":
        options.append(("--max-num-batched-tokens", str(pool.token_budget)))
        options.append(("--enable-prefix-caching", None))
    options.append(("--max-model-len", str(plan.context)))
    options.append(("--gpu-memory-utilization", f"{plan.memory_fraction:g}"))
    options.append(("--kv-cache-dtype", KV_DTYPES["vllm"].get(plan.kv, "auto")))
    if pool.weights == "fp8":
        options.append(("--quantization", "fp8"))
    transfer = kv_transfer(plan, pool)
    if transfer:
        options.append(("--kv-transfer-config", json.dumps(transfer)))
    return checked("vllm", options)


def kv_transfer(plan: Plan, pool: PoolPlan) -> Mapping[str, object] | None:
    """vLLM's KV connector: NIXL between the pools, offloading below HBM, or both."""
    offload = None
    if plan.offload_bytes and pool.role != "decode":
        size = int(plan.offload_bytes * pool.accelerators)
        extra = {"cpu_bytes_to_use": size}
        offload = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if plan.split and offload:
        both = {"connectors": [NIXL, offload]}
        return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": both}
    return NIXL if plan.split else offload


def sglang_options(plan: Plan, pool: PoolPlan) -> Options:
    """What `sglang.launch_server` is given for an engine of a pool, network addresses apart."""
    ranks = pool.tensor_parallel * pool.data_parallel
    options: Options = [("--tp-size", str(ranks))]
    if pool.pipeline_parallel > 1:
        options.append(("--pp-size", str(pool.pipeline_parallel)))
    if pool.data_parallel > 1:
        options += [("--dp-size", str(pool.data_parallel)), ("--enable-dp-attention", None)]
    if pool.expert_parallel:
        options.append(("--ep-size", str(ranks)))
    if plan.overlaps(pool):
        options.append(("--enable-two-batch-overlap", None))
    if pool.role != "prefill":
        options.append(("--max-running-requests", str(pool.max_batch)))
    if pool.role != "decode":
        options.append(("--chunked-prefill-size", str(pool.token_budget)))
    if plan.chunked:
        options.append(("--enable-mixed-chunk", None))
    options.append(("--context-length", str(plan.context)))
    options.append(("--mem-fraction-static", f"{plan.memory_fraction:g}"))
    options.append(("--kv-cache-dtype", KV_DTYPES["sglang"].get(plan.kv, "auto")))
    if pool.weights == "fp8":
        options.append(("--quantization", "fp8"))
    if plan.offload_bytes and pool.role != "decode":
        gigabytes = math.ceil(plan.offload_bytes / 1e9)
        options += [("--enable-hierarchical-cache", None), ("--hicache-size", str(gigabytes))]
    if plan.split:
        options += [("--disaggregation-mode", pool.role), ("--disaggregation-transfer-backend", "nixl")]
    return checked("sglang", options)


def script(head: str, lines: list[str], options: Options) -> str:
    """A shell script: its head, lines before, and a command with one option a line; values may name variables."""

    def quoted(value: str) -> str:
        return value if value.startswith('"$') else shlex.quote(value)

    text = [lines[-1], *[name if value is None else f"{name} {quoted(value)}" for name, value in options]]
    return head + "\n".join(lines[:-1]) + "\nexec " + " \\\n  ".join(text) + "\n"


def _head(plan: Plan, pool: PoolPlan) -> str:
    nodes = f", each on {pool.nodes} machines (NODE_RANK from 0, MASTER the first)" if pool.nodes > 1 else ""
    what = f"One of {pool.replicas} {pool.role} engines on {pool.accelerators} x {pool.accelerator.id}{nodes}."
    return _HEAD.format(what=what, title=plan.title)


def vllm_scripts(plan: Plan) -> dict[str, str]:
    """File name -> shell script that starts one engine of each pool, and the router."""
    files = {}
    for pool in plan.pools:
        lines = [f'MODEL="${{MODEL:-{plan.model}}}"']
        options: Options = [("--host", "0.0.0.0"), ("--port", '"${PORT:-8000}"'), *vllm_options(plan, pool)]
        if plan.split:
            lines.append(': "${HOST:?address of this machine, as the other pool sees it}"')
            lines.append('export VLLM_NIXL_SIDE_CHANNEL_HOST="$HOST"')
            lines.append('export VLLM_NIXL_SIDE_CHANNEL_PORT="${SIDE_CHANNEL_PORT:-5600}"')
        if pool.nodes > 1:
            options += [("--nnodes", str(pool.nodes)), ("--node-rank", '"${NODE_RANK:?0 on the first machine}"')]
            options.append(("--master-addr", '"${MASTER:?address of the first machine}"'))
        checked("vllm", options)
        command = 'vllm serve "$MODEL"'
        if pool.nodes > 1:
            lines.append('FOLLOWER=(); [ "$NODE_RANK" = 0 ] || FOLLOWER=(--headless)')
            command += ' "${FOLLOWER[@]}"'
        files[f"{pool.role}.sh"] = script(_head(plan, pool), [*lines, command], options)
    policy = _POLICIES[plan.routing] if plan.routing != "affinity" else "consistent_hash"
    files["router.sh"] = _router(plan, "vllm-router", "vllm-router", [("--policy", policy)], "--vllm-pd-disaggregation")
    return files


_POLICIES = {  # of sglang_router, and but for affinity of vllm-router, which came of it
    "affinity": "cache_aware",
    "prefix-aware": "cache_aware",
    "balanced": "power_of_two",
    "random": "random",
}


def sglang_scripts(plan: Plan) -> dict[str, str]:
    """The same for SGLang."""
    files = {}
    for pool in plan.pools:
        lines = [f'MODEL="${{MODEL:-{plan.model}}}"']
        options: Options = [("--model-path", '"$MODEL"'), ("--host", "0.0.0.0"), ("--port", '"${PORT:-30000}"')]
        options += sglang_options(plan, pool)
        if pool.nodes > 1:
            options += [("--nnodes", str(pool.nodes)), ("--node-rank", '"${NODE_RANK:?0 on the first machine}"')]
            options.append(("--dist-init-addr", '"${MASTER:?address of the first machine}:5000"'))
        checked("sglang", options)
        files[f"{pool.role}.sh"] = script(_head(plan, pool), [*lines, "python3 -m sglang.launch_server"], options)
    near = _POLICIES[plan.routing]
    policies: Options = [("--policy", near)]
    if plan.split:
        policies = [("--prefill-policy", near), ("--decode-policy", "power_of_two")]
    command = "python3 -m sglang_router.launch_router"
    files["router.sh"] = _router(plan, "sglang-router", command, policies, "--pd-disaggregation")
    return files


def _router(plan: Plan, engine: str, command: str, policies: Options, apart: str) -> str:
    """The router's script: engines' URLs in PREFILL_URLS and DECODE_URLS, or in URLS, separated by blanks."""
    options: Options = [("--host", "0.0.0.0"), ("--port", '"${PORT:-8080}"'), *policies]
    checked(engine, [*options, (apart, None)] if plan.split else options)
    head = _HEAD.format(what="The router that clients talk to.", title=plan.title)
    if not plan.split:
        checked(engine, [("--worker-urls", None)])
        needed = f"URLs of the {plan.pools[0].replicas} engines, separated by blanks"
        lines = [f': "${{URLS:?{needed}}}"', 'read -ra WORKERS <<< "$URLS"']
        return script(head, [*lines, f'{command} --worker-urls "${{WORKERS[@]}}"'], options)
    checked(engine, [("--prefill", None), ("--decode", None)])
    lines = []
    for pool in plan.pools:
        name = f"{pool.role.upper()}_URLS"
        lines.append(f': "${{{name}:?URLs of the {pool.replicas} {pool.role} engines, separated by blanks}}"')
    lines.append("ENGINES=()")
    lines += [f'for url in ${pool.role.upper()}_URLS; do ENGINES+=(--{pool.role} "$url"); done' for pool in plan.pools]
    return script(head, [*lines, f'{command} {apart} "${{ENGINES[@]}}"'], options)
