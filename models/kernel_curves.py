"""The fitted curves of each accelerator generation (kernels.toml), and what a generation without its own takes over.

An operator is a kernel and, where that matters, its precision: `gemm_fp8`, `prefill_attention_bf16`. One that was not
measured on a generation takes the curve of the next wider precision there, then that of the generation this one
`inherits` from. Nothing is guessed quietly: `provenance` says where each came from.
"""

from collections.abc import Mapping
from typing import Any

from breakeven.models.catalog import table

WIDER = {"int8": "fp8", "fp8_block": "fp8", "fp4": "fp8", "fp8": "bf16"}  # whose curve stands in, at one's own peak
PRODUCT = ("share", "read", "latency_s")
NUMBERS = {
    "gemm": PRODUCT,
    "experts": (*PRODUCT, "permute_bytes"),
    "prefill_attention": ("share", "half_keys", "softmax_flops", "latency_s"),
    "prefill_mla": ("share", "half_keys", "latency_s"),
    "decode_attention": PRODUCT,
    "decode_mla": PRODUCT,
    "vision_attention": ("share", "half_keys", "softmax_flops", "latency_s"),
    "allreduce": ("share", "latency_s", "half_bytes", "per_rank", "ring_power"),
    "alltoall": ("share", "latency_s", "half_bytes"),
    "gather": ("share", "latency_s", "half_bytes", "per_rank"),
}
PRECISIONS = {
    "gemm": ("bf16", "int8", "fp8", "fp8_block", "fp4"),
    "experts": ("bf16", "int8", "fp8", "fp8_block", "fp4"),
    "prefill_attention": ("bf16", "fp8"),
    "prefill_mla": ("bf16", "fp8"),
    "decode_attention": ("bf16", "fp8"),
    "decode_mla": ("bf16", "fp8"),
    "vision_attention": ("bf16",),
}
OPERATORS = tuple(f"{kind}_{p}" if p else kind for kind in NUMBERS for p in PRECISIONS.get(kind, ("",)))


def split(operator: str) -> tuple[str, str]:
    """(kind, precision) of an operator's name; the precision is empty for a collective.

    >>> split("prefill_attention_fp8")
    ('prefill_attention', 'fp8')
    """
    for kind, precisions in PRECISIONS.items():
        if operator in [f"{kind}_{precision}" for precision in precisions]:
            return kind, operator.removeprefix(f"{kind}_")
    return operator, ""


def own_curve(generation: str, operator: str) -> tuple[str, dict[str, Any]] | None:
    """(operator it was measured as, its row) among a generation's own kernels; None where none will do."""
    rows = table("kernels").get(generation, {})
    kind, precision = split(operator)
    while f"{kind}_{precision}" not in rows and precision in WIDER:
        precision = WIDER[precision]
    name = f"{kind}_{precision}" if precision else kind
    return (name, rows[name]) if name in rows else None


def parents(generation: str) -> list[str]:
    """The generation and those that it inherits from, nearest first."""
    heirs = table("kernels")["inherits"]
    found = [generation]
    while found[-1] in heirs or found[-1] not in table("kernels"):
        found.append(heirs.get(found[-1], heirs["default"]))
    return found


def provenance(generation: str, operator: str) -> tuple[str, str, dict[str, Any]]:
    """(generation, operator, row) of the curve that is used."""
    for name in parents(generation):
        found = own_curve(name, operator)
        if found:
            return name, *found
    raise KeyError(f"kernels.toml has no curve for {operator} of {generation}")


def curves(generation: str) -> dict[str, dict[str, float]]:
    """Every operator's numbers for a generation, as fitted or taken over."""
    return {
        operator: {name: float(provenance(generation, operator)[2][name]) for name in NUMBERS[split(operator)[0]]}
        for operator in OPERATORS
    }


def sources(generation: str) -> dict[str, str]:
    """For `explain`: where a generation's curves come from, those measured on it first."""
    own: list[str] = []
    borrowed: dict[str, list[str]] = {}
    for operator in OPERATORS:
        owner, name, _ = provenance(generation, operator)
        if owner != generation:
            borrowed.setdefault(f"taken over from {owner}", []).append(operator)
        elif name != operator:
            borrowed.setdefault(f"no kernels of its own, as {name}", []).append(operator)
        else:
            own.append(operator)
    found = {f"kernels of {generation}": f"fitted to its own: {', '.join(own)}" if own else "none of its own"}
    return found | {f"kernels of {generation}, {words}": ", ".join(names) for words, names in borrowed.items()}


def extrapolated(generation: str, operator: str, sizes: Mapping[str, float]) -> list[str]:
    """Which of these sizes lie outside the range that the operator's curve was fitted to, in words.

    >>> extrapolated("hopper", "allreduce", {"ranks": 16.0})
    ['ranks 16, measured from 2 to 8']
    """
    spans = provenance(generation, operator)[2]["fitted"]
    return [
        f"{name} {value:,.0f}, measured from {spans[name][0]:,.0f} to {spans[name][1]:,.0f}"
        for name, value in sizes.items()
        if name in spans and not spans[name][0] <= value <= spans[name][1]
    ]
