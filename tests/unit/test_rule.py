"""The choice of methods in Poseidon: SACP on the shapes of the paper, and the rule that knows the link."""

import pytest

from tutti.cluster import Link
from tutti.collectives import ring
from tutti.strategies.poseidon.rule import LayerShape, bucket_bytes_on, decide, published, published_floats, sent_bytes

FC6 = LayerShape("fc6", 4096, 9216, 256)
FC7 = LayerShape("fc7", 4096, 4096, 256)
FC8 = LayerShape("fc8", 1000, 4096, 256)


@pytest.mark.parametrize(
    ("link", "num_bytes"),
    [
        (None, 4 * 2**20),
        (Link("100mbit", "100us"), 2**16),
        (Link("1gbit", "200us"), 250_000),
        (Link("100gbit", "1ms"), 4 * 2**20),
    ],
)
def test_buckets_are_as_small_as_the_latency_allows(link: Link | None, num_bytes: int) -> None:
    assert bucket_bytes_on(link) == num_bytes


def test_what_the_paper_says_of_alexnet() -> None:
    """On 8 workers with a batch of 256 the largest layers are broadcast, and the protocols cost what is published."""
    floats = published_floats(FC7, 8)
    assert floats["full"] == 2 * 8 * 4096 * 4096
    assert floats["broadcast"] == 7 * 7 * 256 * (4096 + 4096)
    assert floats["owners"] == 8 * 256 * 8192 + 8 * 4096 * 4096
    assert published(FC6, 8) == published(FC7, 8) == "broadcast"
    assert published(FC8, 8) == "owners"  # 64 million against 43.


@pytest.mark.parametrize("num_workers", [2, 4, 8, 32])
def test_rows_turn_the_choice(num_workers: int) -> None:
    few, many = LayerShape("fc", 4096, 4096, 1), LayerShape("fc", 4096, 4096, 4096)
    assert published(few, num_workers) == "broadcast"
    if num_workers > 2:
        assert published(many, num_workers) == "owners"


def test_the_published_rule_leaves_convolutions_in_full() -> None:
    few = LayerShape("conv", 64, 256, 1, convolution=True)
    assert published(few, 8) == "full"
    link = Link("100mbit", "100us")
    priced = decide(few, "priced", 8, link, lambda size: ring.cost(8, size, link), 1e12)
    assert priced.method == "broadcast", "by its price it has factors like any other"


def test_bytes_of_a_worker() -> None:
    sent = sent_bytes(LayerShape("fc", 10, 20, 3), 4)
    assert sent == {"full": 2 * 3 / 4 * 800, "broadcast": 3 * 3 * 30 * 4, "owners": 3 / 4 * 120 + 3 * 240 + 3 / 4 * 800}


def test_the_link_decides() -> None:
    """Factors are chosen on slow links. On fast ones their products cost more than the bytes they save."""
    shape = LayerShape("fc", 1024, 1024, 64)

    def method(rate: str, rows: int = 64) -> str:
        link = Link(rate, "100us")
        return decide(
            LayerShape("fc", 1024, 1024, rows), "priced", 4, link, lambda size: ring.cost(4, size, link), 1e11
        ).method

    assert method("100mbit") == "broadcast"
    assert method("100gbit") == "full"
    assert method("100mbit", rows=100_000) == "full"
    link = Link("100mbit", "100us")
    taken = decide(shape, "priced", 4, link, lambda size: ring.cost(4, size, link), 1e11)
    assert taken.seconds[taken.method] == min(taken.seconds.values())


def test_between_few_rows_and_many_owners_are_the_fastest() -> None:
    link = Link("100mbit", "100us")
    shape = LayerShape("fc", 4096, 1024, 100)
    chosen = decide(shape, "priced", 32, link, lambda size: ring.cost(32, size, link), 1e12)
    assert chosen.method == "owners"
