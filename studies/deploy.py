"""Launch files of a deployment for one engine, with what that engine cannot do, or does otherwise, said beside them."""

from collections.abc import Callable, Mapping
from pathlib import Path

from breakeven.models.support import lacking, topology_support
from breakeven.studies.launch import KV_DTYPES, sglang_scripts, vllm_scripts
from breakeven.studies.manifests import VERSION, dynamo, llm_d
from breakeven.studies.plan import Plan

# target -> (the engine that serves, file name -> its content)
TARGETS: Mapping[str, tuple[str, Callable[[Plan], dict[str, str]]]] = {
    "vllm": ("vllm", vllm_scripts),
    "sglang": ("sglang", sglang_scripts),
    "dynamo": ("vllm", lambda plan: {"deployment.yaml": dynamo(plan)}),
    "llm-d": ("vllm", lambda plan: {"values.yaml": llm_d(plan)}),
}
_CHECKPOINTS = {
    "int8": "a W8A8 checkpoint (compressed-tensors)",
    "int4": "an AWQ or GPTQ checkpoint",
    "fp4": "an NVFP4 checkpoint",
    "fp4-output": "an NVFP4 checkpoint whose projections into attention are in 16 bit",
    "fp4-ffn": "an NVFP4 checkpoint whose attention is in 16 bit",
    "fp4-experts": "a checkpoint whose experts are MXFP4 or NVFP4",
}


def missing(plan: Plan, target: str) -> list[str]:
    """What the target cannot do of a plan, or only experimentally, with who says so."""
    lacks = lacking(
        TARGETS[target][0], plan.topology, plan.needs, plan.kv, plan.offload_bytes > 0.0, plan.transfer.asks
    )
    lacks += plan.undocumented
    if target == "llm-d" and any(pool.nodes > 1 and pool.data_parallel == 1 for pool in plan.pools):
        lacks.append(
            "an engine over several machines is documented for data parallelism only (llm-d-modelservice README)"
        )
    return lacks


def write_deployment(plan: Plan, target: str, folder: Path) -> list[str]:
    """Write the launch files and NOTES.md; the names of the files."""
    files = TARGETS[target][1](plan) | {"NOTES.md": notes(plan, target)}
    for name, text in files.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            path.chmod(0o755)
    return list(files)


def notes(plan: Plan, target: str) -> str:
    """NOTES.md: what the files start, what the engine cannot do, what differs, what to fill in."""
    lacks = missing(plan, target)
    parts = [f"# {plan.title} on {target}", _what(plan)]
    if lacks:
        parts += ["## What it cannot do", "\n".join(f"* {line}" for line in lacks)]
        parts += ["The files hold what comes nearest; what the model promised does not carry over."]
    else:
        parts += [f"{target} documents support for all of it (`breakeven catalog support`)."]
    parts += ["## What to know", "\n".join(f"* {line}" for line in _differences(plan, target))]
    return "\n\n".join(parts) + "\n"


def _what(plan: Plan) -> str:
    lines = []
    for pool in plan.pools:
        ranks = f"TP{pool.tensor_parallel} PP{pool.pipeline_parallel} DP{pool.data_parallel}"
        ranks += " EP" if pool.expert_parallel else ""
        ranks += f" CP{pool.context_parallel}" if pool.context_parallel > 1 else ""
        lines.append(
            f"* {pool.role}: {pool.replicas} engines of {pool.accelerators} x {pool.accelerator.id} on "
            f"{pool.nodes} machine{'s' if pool.nodes > 1 else ''}, {ranks}, weights {pool.weights}, KV {plan.kv}"
        )
    return "\n".join(lines)


def _differences(plan: Plan, target: str) -> list[str]:
    engine = TARGETS[target][0]
    lines = [f"Model: {plan.model}. Name your own checkpoint (MODEL, or in the manifest) where it is another one."]
    lines += _formats(plan, engine)
    note = topology_support(engine, plan.topology).note
    if note:
        lines.append(f"{plan.topology}: {note}.")
    lines += _between_pools(plan) if plan.split else []
    if any(pool.nodes > 1 for pool in plan.pools):
        lines.append("Engines that span machines start once on each of them.")
    if plan.sticky:
        lines.append("Sessions stay with their engine: clients send X-Session-ID, or the router goes by prefixes.")
    if plan.offload_bytes:
        size = f"{plan.offload_bytes / 1e9:,.0f} GB"
        lines.append(f"{size} of host memory per accelerator hold KV cache below HBM.")
    if plan.deeper_tiers:
        lines.append(f"Tiers below that ({', '.join(plan.deeper_tiers)}) are not written: name their mounts yourself.")
    if target in ("dynamo", "llm-d"):
        lines.append(f"Replace {VERSION} by a release, and the nodeSelector by your cluster's label.")
    lines.append(f"Contexts up to {plan.context:,} tokens; the engine keeps {plan.memory_fraction:.0%} of the memory.")
    return lines


def _formats(plan: Plan, engine: str) -> list[str]:
    """What the weight and KV formats ask of the checkpoint."""
    lines = []
    for weights in dict.fromkeys(pool.weights for pool in plan.pools):
        if weights in _CHECKPOINTS:
            lines.append(f"Weights {weights} need {_CHECKPOINTS[weights]}: the engine reads the format from it.")
        elif weights == "fp8":
            lines.append("Weights fp8: `--quantization fp8` quantizes a BF16 checkpoint; leave it out for an FP8 one.")
    if plan.kv not in KV_DTYPES[engine]:
        lines.append(f"KV cache {plan.kv}: {engine} has no such format, the files say auto.")
    return lines


def _between_pools(plan: Plan) -> list[str]:
    """What joins the pools of a split."""
    lines = [f"The KV cache crosses {plan.link} by NIXL; name the devices to UCX (UCX_NET_DEVICES, UCX_TLS)."]
    if len({pool.accelerator.generation for pool in plan.pools}) > 1:
        lines.append("The pools are of different generations: name one attention backend that both have.")
    if any(pool.pipeline_parallel > 1 for pool in plan.pools):
        lines.append("Pipelines beside disaggregation are not in the documented compatibility table: try first.")
    return lines
