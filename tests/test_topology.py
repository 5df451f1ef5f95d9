"""Partitions of the five stages: how many, in what form, and that names of pools mean nothing."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.models.serving import evaluate
from breakeven.models.topology import STAGES, TOPOLOGIES, all_partitions, any_topology, partition, topology

labels = st.lists(st.integers(0, 9), min_size=5, max_size=5)


def test_there_are_52_partitions():
    """The fifth Bell number, each once and in its own canonical form."""
    found = all_partitions()
    assert len(found) == len(set(found)) == 52
    assert all(partition(p) == p for p in found) and found == sorted(found)


@given(labels)
def test_partition_is_idempotent_and_one_of_the_52(given_labels):
    found = partition(given_labels)
    assert partition(found) == found and found in all_partitions()


@given(labels, st.permutations(range(10)))
def test_renaming_pools_changes_no_partition(given_labels, names):
    assert partition([names[label] for label in given_labels]) == partition(given_labels)
    assert partition([str(label) for label in given_labels]) == partition(given_labels)


@given(labels, labels)
def test_partitions_are_equal_exactly_when_the_same_stages_share(a, b):
    def shared(p):
        return [[x == y for y in p] for x in p]

    assert (partition(a) == partition(b)) == (shared(a) == shared(b))


def test_a_partition_labels_five_stages():
    with pytest.raises(ValueError, match="5 stages"):
        partition([0, 1])


def test_named_topologies_are_partitions_with_a_name_per_pool():
    for named in TOPOLOGIES.values():
        assert partition(named.labels) == named.labels
        assert len(named.pools) == len(set(named.labels))


def relabel(deployment, mapping):
    stages = {}
    for name in STAGES:
        stage = getattr(deployment, name)
        pool = jnp.asarray(np.array(mapping)[np.asarray(stage.pool)], jnp.int32)
        stages[name] = dataclasses.replace(stage, pool=pool)
    return dataclasses.replace(deployment, **stages)


def test_the_model_sees_which_stages_share_and_no_names(study, deployment):
    """Pools called 5 and 2 give the outcome of pools called 0 and 1, to the last bit."""
    outcomes = [
        evaluate(d, study.workload, study.slo, study.catalog) for d in (deployment, relabel(deployment, [5, 2]))
    ]
    for a, b in zip(*outcomes, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


def test_topologies_by_name_and_by_pools():
    """The written form of a partition is that of its named topology, whatever the order."""
    assert topology("DF | DA | E PA PF") is TOPOLOGIES["afd"]
    other = topology("E PA | PF DF | DA")
    assert other.labels == (0, 0, 1, 2, 1) and topology(other.name) == other
    with pytest.raises(KeyError):
        topology("E PA | PF DF")
    assert len(any_topology()) == 16 and len({t.name for t in any_topology()}) == 16
