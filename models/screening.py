"""What is certainly wrong with a deployment, before its fixed point is solved: a hundredth of the work of `evaluate`.

Memory, cost, power, inventory and the link's load do not depend on where the deployment settles. Prefill and decode
are at least as busy as they would be with every prefix held, every batch full and nothing else in the pool.
"""

import jax
import jax.numpy as jnp

from breakeven.models.deployment import Deployment
from breakeven.models.economics import fleet
from breakeven.models.encoder import encode_busy
from breakeven.models.limits import Busy, Violations, limits_broken, pool_use
from breakeven.models.operating_point import Pools, decode_load
from breakeven.models.pools import build_pools
from breakeven.models.tables import Catalog, resolve
from breakeven.models.waits import return_utilization
from breakeven.models.workload import Workload

MARGIN = 1e-3  # of a utilization: 32-bit rounding must not rule out what the model finds just feasible


@jax.jit
def screen(deployment: Deployment, workload: Workload, catalog: Catalog) -> Violations:
    """Lower bounds of the excess over each limit that `evaluate` finds, shapes (n,).

    Whoever breaks one here is infeasible. A closed population has no rate yet, so its utilizations rule nothing out.
    """
    resolved = resolve(deployment, catalog)
    pools, _ = build_pools(resolved, workload, catalog)
    least = _least(pools, workload, catalog)
    money = fleet(resolved, catalog.economy, pool_use(resolved, least))
    return limits_broken(resolved, pools, workload, least, money, catalog)


def _least(pools: Pools, workload: Workload, catalog: Catalog) -> Busy:
    """Lower bounds of the utilizations, per engine."""
    none = jnp.zeros_like(pools.shared)
    if workload.concurrent_sessions is not None or workload.sessions_per_second is None:
        return Busy(none, none, none, none, none)
    calls = workload.sessions_per_second * workload.calls_per_session
    prefill_rate, decode_rate = calls / pools.prefill_replicas, calls / pools.decode_replicas
    # Weight traffic and launches are shared by prefills computed together; arithmetic is not.
    prefill = prefill_rate * (pools.marginal_s / pools.prefill_ways)
    decode = decode_load(pools, workload, catalog.llm, decode_rate, none, none)
    decode = jnp.where(pools.chunked > 0.5, none, decode)  # tokens that ride with chunks take no step of their own
    link_s = pools.moved.link_s
    if (
        pools.retained is not None
    ):  # of calls that decode may hold, at least what is missing, and none of the local ones
        keeps, remote = pools.retained.keeps, 1.0 - pools.retained.local_share
        link_s = link_s + keeps * (remote * jnp.minimum(pools.retained.partial.link_s, link_s) - link_s)
        prefill = prefill * (1.0 - keeps * pools.retained.local_share)
    link = jnp.maximum(prefill_rate * link_s / pools.prefill_workers, return_utilization(decode_rate, pools))
    encode = none if pools.encode is None else encode_busy(pools.encode, calls, 0.0)
    return Busy(prefill - MARGIN, decode - MARGIN, link - MARGIN, none, encode - MARGIN)
