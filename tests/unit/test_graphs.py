"""Graphs of ranks: mixing matrices, spectral gaps, and invalid graphs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import ConfigError
from tutti.strategies import Gossip, Graph, PeerUpdates, parse
from tutti.strategies.decentralised.graphs import NAMED, ring, topology_for, torus


@given(st.sampled_from(sorted(NAMED)), st.integers(1, 40), st.integers(0, 99))
def test_named_graphs_are_doubly_stochastic(name: str, size: int, clock: int) -> None:
    matrix = NAMED[name](size).mixing(clock)
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-14)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-14)


@st.composite
def connected(draw: st.DrawFn) -> Graph:
    """A tree, and some edges more."""
    size = draw(st.integers(1, 20))
    edges = [(draw(st.integers(0, rank - 1)), rank) for rank in range(1, size)]
    places = st.integers(0, size - 1)
    more = draw(st.lists(st.tuples(places, places), max_size=20))
    return Graph(size, tuple(edges + [(a, b) for a, b in more if a != b]))


@given(connected())
def test_custom_graphs_are_doubly_stochastic(graph: Graph) -> None:
    matrix = graph.mixing(0)
    assert (matrix >= -1e-15).all()
    np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-14)
    np.testing.assert_array_equal(matrix, matrix.T)
    assert graph.size == 1 or 0 < graph.spectral_gap <= 1
    assert parse(f"gossip:graph={graph}") == Gossip(graph)


@given(st.integers(2, 20), st.integers(0, 19))
def test_directed_graphs_are_column_stochastic(size: int, hop: int) -> None:
    edges = {(rank, (rank + step) % size) for rank in range(size) for step in (1, hop)}
    graph = Graph(size, tuple((a, b) for a, b in edges if a != b), directed=True)
    np.testing.assert_allclose(graph.mixing(0).sum(0), 1, atol=1e-14)
    assert 0 < graph.spectral_gap <= 1


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 12])
def test_mixing_converges_to_the_mean(name: str, size: int) -> None:
    graph, values = NAMED[name](size), np.random.default_rng(0).normal(size=size)
    mixed = values
    for clock in range(600):
        mixed = graph.mixing(clock) @ mixed
    np.testing.assert_allclose(mixed, values.mean(), atol=1e-9)


@pytest.mark.parametrize("size", range(3, 30))
def test_the_gap_of_a_ring(size: int) -> None:
    assert ring(size).spectral_gap == pytest.approx(2 / 3 * (1 - np.cos(2 * np.pi / size)), abs=1e-12)


def test_gaps() -> None:
    assert NAMED["exponential"](16).spectral_gap == 1.0
    assert Graph(5, tuple((a, b) for a in range(5) for b in range(a))).spectral_gap == 1.0
    assert ring(36).spectral_gap < torus(36).spectral_gap < NAMED["exponential"](36).spectral_gap
    assert 0 < NAMED["random"](36).spectral_gap < 1
    assert NAMED["ring"](1).spectral_gap == 1.0


def test_a_torus_of_a_prime_is_a_ring() -> None:
    assert torus(7) == ring(7)
    assert all(len(torus(36).neighbours(rank)) == 4 for rank in range(36))


def test_components_are_listed() -> None:
    apart = Graph(6, ((0, 1), (1, 2), (3, 4)))
    for make in (Gossip, lambda graph: PeerUpdates(graph=graph)):
        with pytest.raises(ConfigError, match=r"\{0, 1, 2\}, \{3, 4\}, \{5\}; add edges"):
            make(apart)
    with pytest.raises(ConfigError, match=r"there and back: its parts are \{0, 1\}, \{2\}"):
        Gossip(Graph(3, ((0, 1), (1, 0), (1, 2)), directed=True))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Graph(3, ((0, 3),)), ("0 to 2", "(0, 3)")),
        (lambda: Graph(3, ((1, 1),)), ("two different ranks", "(1, 1)")),
        (lambda: Graph(0, ()), ("1 or more", "got 0")),
        (lambda: topology_for(Graph(2, ((0, 1),)), 4), ("a graph of 2 ranks", "world of 4", "ring, torus")),
        (lambda: Gossip("circle"), ("got 'circle'", "ring, torus, exponential, random", "Graph(...)")),
        (lambda: Gossip(pairs="both"), ("got 'both'", "'sync' or 'async'")),  # type: ignore[arg-type]
        (lambda: Gossip(Graph(2, ((0, 1), (1, 0)), directed=True), "async"), ("not directed",)),
        (lambda: PeerUpdates(inbox=0), ("inbox", "got 0", "1 or more")),
        (lambda: PeerUpdates(graph="random"), ("got 'random'", "all, ring")),
        (lambda: PeerUpdates("onebit"), ("got 'onebit'", "ErrorFeedback")),  # type: ignore[arg-type]
        (lambda: parse("peers+lowrank:2"), ("AllReduce",)),
        (lambda: parse("peers:box=2"), ("'box'", "graph=, inbox=")),
        (lambda: parse("peers:inbox=x"), ("whole number", "'x'")),
        (lambda: parse("gossip:graph=0-x"), ("0-x", "0-1/1-2")),
        (lambda: parse("gossip+onebit"), ("whole parameters", "peers+onebit")),
    ],
)
def test_invalid_graphs_are_refused(make, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as refused:
        make()
    for part in says:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("peers", PeerUpdates(None)),
        ("peers+threshold", PeerUpdates()),
        ("peers:inbox=4", PeerUpdates(None, inbox=4)),
        ("peers:graph=ring,inbox=4", PeerUpdates(None, "ring", 4)),
        ("gossip", Gossip()),
        ("gossip:graph=torus,pairs=async", Gossip("torus", "async")),
        ("gossip:graph=0>1/1>2/2>0", Gossip(Graph(3, ((0, 1), (1, 2), (2, 0)), directed=True))),
    ],
)
def test_texts_round_trip(text: str, strategy: Gossip | PeerUpdates) -> None:
    assert parse(text) == strategy
    assert str(strategy) == text
    assert hash(parse(text)) == hash(strategy)
