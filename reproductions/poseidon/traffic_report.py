"""Sections of the report on Poseidon about traffic: parameters, layers, published factors, counted bytes."""

from pathlib import Path

from reproductions.poseidon.figures import draw_traffic
from reproductions.poseidon.results import CountedTraffic, PoseidonResults
from reproductions.poseidon.traffic import TIMES_FULL, TIMES_OWNERS, layer_shapes, published_factors, solve_factors
from reproductions.report import Section, figure, prose, table
from tutti.cluster import format_size

_WORKERS, _ROWS = (2, 4, 8, 16, 32), (32, 64, 128, 256)
_METHODS = ("full", "owners", "broadcast")
TRAFFIC_HEADS = ("rule", "workers", "K", "counted", "formula", "difference")


def layers_section(results: PoseidonResults, folder: Path) -> Section:
    """Return the section on parameters and traffic of every layer, and draw its figure."""
    draw_traffic(results, folder / "traffic.png")
    parameters = []
    for row in results.parameters:
        cells = []
        for index in (0, 1):
            for counts in (row.published, row.here):
                cells.append(f"{counts[index] / 1e6:.2f} M, {counts[index] / sum(counts):.2%}")
        parameters.append([row.model, *cells])
    first = results.layers[0]
    layers = []
    for layer in results.layers:
        numbers = [f"{layer.published_floats[method] / 1e6:,.1f}" for method in _METHODS]
        sent = [f"{layer.sent_bytes[method] / 2**20:,.1f}" for method in _METHODS]
        name = f"{layer.layer}, {layer.num_out} × {layer.num_in}"
        layers.append([layer.model, name, layer.sacp, *numbers, *sent])
    heads = ["model", "layer", "SACP chooses", "2PMN", "PK(M+N) + PMN", "(P−1)²K(M+N)", *_METHODS]
    return Section(
        "Traffic by layer",
        [
            table(
                ("model", "convolutions, published", "here", "fully connected, published", "here"),
                parameters,
                num_text_columns=1,
            ),
            prose("""AlexNet here has one tower, so its convolutions are wider than Caffe's, which are split into two
            groups. VGG-16 is Simonyan and Zisserman's configuration D. Its convolutions have twice the parameters that
            the slides give; the slides do not say which network they counted."""),
            figure("Numbers sent with every protocol, layer by layer", "traffic.png"),
            prose(f"""Million numbers sent per step by all {first.workers} workers with {first.num_rows} samples each,
            by the published formulas; and MiB sent per step by one worker as `Poseidon` implements it (last three
            columns):"""),
            table(heads, layers, num_text_columns=3),
        ],
    )


def factors_section() -> Section:
    """Return the section on the workers and batch sizes for which the published factors hold."""
    workers, ratio = solve_factors()
    by_name = {shape.name: shape for shape in layer_shapes("AlexNet", 256)}
    fc7 = by_name["fc7"]
    num_rows = fc7.num_out * fc7.num_in / (fc7.num_out + fc7.num_in) / ratio
    rows = []
    for number in _WORKERS:
        cells = []
        for batch in _ROWS:
            (shape,) = (shape for shape in layer_shapes("AlexNet", batch) if shape.name == "fc7")
            cells.append(_factor_text(published_factors([shape], number)))
        cells.append(_factor_text(published_factors(list(by_name.values()), number)))
        rows.append([str(number), *cells])
    return Section(
        f"The published factors {TIMES_FULL:g} and {TIMES_OWNERS:g}",
        [
            prose(f"""Broadcasting factors is said to be {TIMES_FULL:g} times faster than server and clients, and
            {TIMES_OWNERS:g} times faster than Microsoft's Adam. The slides do not say for which number of workers P and
            batch size K. Two factors and two formulas give P = {workers:.2f} and MN / K(M+N) = {ratio:.2f}; for a layer
            of 4096 × 4096, K = {num_rows:.0f}. Both factors are, in all published digits, the **numbers sent for fc7 by
            4 workers with batches of 256**. Neither holds for the 8 nodes of the experiments."""),
            "Factor by which a broadcast sends less than server and clients, and than Adam, for fc7:",
            table(
                ["workers", *(f"K = {number}" for number in _ROWS), "all three layers, K = 256"],
                rows,
                num_text_columns=0,
            ),
            prose("""The traffic of a broadcast grows with P², that of the others with P. From some P on a broadcast
            sends more than Adam, which SACP takes into account."""),
        ],
    )


def _factor_text(factors: tuple[float, float]) -> str:
    return f"{factors[0]:.1f}, {factors[1]:.1f}"


def counted_section(results: PoseidonResults) -> Section:
    """Return the section on counted bytes."""
    largest = max(abs(row.error) for row in results.traffic)
    return Section(
        "Counted traffic",
        [
            prose("""AlexNet's fully connected layers alone: bytes sent per step by one worker, counted in a simulation
            by sizes alone, and by the formulas of [docs/poseidon.md](../../docs/poseidon.md) with biases in a
            ring."""),
            table(TRAFFIC_HEADS, [traffic_row(row) for row in results.traffic], num_text_columns=1),
            f"The largest difference is {largest:.2%}.",
        ],
    )


def traffic_row(row: CountedTraffic) -> list[str]:
    """Return the cells of a table with `TRAFFIC_HEADS`."""
    sizes = [format_size(row.sent_bytes), format_size(row.formula_bytes)]
    return [row.rule, str(row.workers), str(row.num_rows), *sizes, f"{row.error:+.2%}"]
