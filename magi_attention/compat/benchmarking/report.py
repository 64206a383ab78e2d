# SPDX-License-Identifier: Apache-2.0
"""Sweeps over parameters as tables, CSV files and plots. Plots need matplotlib, data frames pandas."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magi_attention.cli.common import table_text
from magi_attention.compat.figures import drawn, pyplot
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.tools.report.html import Section, page


def _is_first_rank() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


@dataclass
class Benchmark:
    """A sweep: the function is called with every x and every line.

    Args:
        x_names: arguments that get the x value (or, if it is a tuple, one item each).
        x_vals: x values.
        line_arg: argument that names the line; ``line_vals`` its values, ``line_names`` their labels.
        plot_name: name of the plot and of its files.
        args: arguments that stay the same.
        xlabel, ylabel, x_log, y_log: axes; ``ylabel`` may be a dictionary from metric to label.
        styles: (colour, line style) of each line.
    """

    x_names: list[str]
    x_vals: list[Any]
    line_arg: str
    line_vals: list[Any]
    line_names: list[str]
    plot_name: str
    args: dict[str, Any] = field(default_factory=dict)
    xlabel: str = ""
    ylabel: str | Mapping[str, str] = ""
    x_log: bool = False
    y_log: bool = False
    styles: list[tuple[str, str]] | None = None

    def __post_init__(self) -> None:
        if len(self.line_vals) != len(self.line_names):
            raise ContractError(f"{len(self.line_vals)} line_vals, {len(self.line_names)} line_names; pair them.")

    @classmethod
    def from_csv(cls, csv_path: str | Path, line_arg: str = "line", **kwargs: Any) -> Benchmark:
        """The sweep behind a file that ``Mark.run`` wrote; keywords override its fields."""
        table = Table.from_csv(csv_path)
        values: dict[str, Any] = {
            "x_names": table.x_names,
            "x_vals": [x[0] if len(x) == 1 else tuple(x) for x in table.x_vals],
            "line_arg": line_arg,
            "line_vals": list(table.lines),
            "line_names": list(table.lines),
            "plot_name": Path(csv_path).stem,
            "xlabel": ", ".join(table.x_names),
        }
        return cls(**{**values, **kwargs})


@dataclass
class Table:
    """One metric: for each line label the values over ``x_vals``; a bar is ``(low, high)`` or None."""

    x_names: list[str]
    x_vals: list[tuple[Any, ...]]
    lines: dict[str, list[float]]
    bars: dict[str, list[tuple[float, float] | None]]

    def rows(self) -> list[list[Any]]:
        """Header and rows. A line with bars has two more columns."""
        header = [*self.x_names]
        columns: list[list[Any]] = []
        for name, values in self.lines.items():
            header.append(name)
            columns.append(values)
            if any(bar is not None for bar in self.bars[name]):
                header += [f"{name}-min", f"{name}-max"]
                pairs = [bar or (value, value) for bar, value in zip(self.bars[name], values)]
                columns += [[low for low, _ in pairs], [high for _, high in pairs]]
        return [header, *([*x, *cells] for x, *cells in zip(self.x_vals, *columns))]

    def cells(self) -> list[list[str]]:
        """``rows`` as text."""
        return [[f"{c:.4g}" if isinstance(c, float) else str(c) for c in row] for row in self.rows()]

    def text(self) -> str:
        return table_text("", self.cells())

    def to_csv(self, path: str | Path) -> None:
        """First line ``# x: <number of x columns>``, then header and rows."""
        with open(path, "w", newline="") as file:
            file.write(f"# x: {len(self.x_names)}\n")
            csv.writer(file).writerows(self.rows())

    @classmethod
    def from_csv(cls, path: str | Path) -> Table:
        with open(path, newline="") as file:
            first = file.readline()
            if not first.startswith("# x: "):
                raise ContractError(f"{path} does not begin with '# x: n'; give a file of Mark.run.")
            num_x = int(first[5:])
            header, *rows = list(csv.reader(file))
        names = header[num_x:]
        columns = {name: [float(row[num_x + i]) for row in rows] for i, name in enumerate(names)}
        lines = [n for n in names if not (n.endswith(("-min", "-max")) and n[:-4] in names)]
        bars: dict[str, list[tuple[float, float] | None]] = {}
        for name in lines:
            low, high = columns.get(f"{name}-min"), columns.get(f"{name}-max")
            bars[name] = [None] * len(rows) if low is None or high is None else list(zip(low, high))
        x_vals = [tuple(_number(cell) for cell in row[:num_x]) for row in rows]
        return cls(header[:num_x], x_vals, {name: columns[name] for name in lines}, bars)

    def to_df(self):
        """A pandas DataFrame; ``UnsupportedError`` without pandas."""
        try:
            import pandas
        except ImportError:
            raise UnsupportedError("Data frames need pandas; run `pip install pandas`.") from None
        header, *rows = self.rows()
        return pandas.DataFrame(rows, columns=header)


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class Mark:
    """A function with its sweeps; made by ``perf_report``."""

    def __init__(self, fn: Callable[..., Any], benchmarks: Benchmark | Sequence[Benchmark]) -> None:
        self.fn = fn
        self.benchmarks = [benchmarks] if isinstance(benchmarks, Benchmark) else list(benchmarks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def collect(self, bench: Benchmark, **kwargs: Any) -> dict[str, Table]:
        """Calls the function; one table per metric.

        It returns a number, or ``(value, low, high)``, or a dictionary of these by metric. A plain result is
        metric ``""``.
        """
        tables: dict[str, Table] = {}
        for x in bench.x_vals:
            x_tuple = tuple(x) if isinstance(x, (tuple, list)) else (x,) * len(bench.x_names)
            x_args = dict(zip(bench.x_names, x_tuple))
            for value, name in zip(bench.line_vals, bench.line_names):
                result = self.fn(**x_args, **{bench.line_arg: value}, **bench.args, **kwargs)
                for metric, point in (result if isinstance(result, dict) else {"": result}).items():
                    middle, bar = (point[0], tuple(point[1:])) if isinstance(point, (tuple, list)) else (point, None)
                    if metric not in tables:
                        tables[metric] = Table(list(bench.x_names), [], {}, {})
                    table = tables[metric]
                    if not table.x_vals or table.x_vals[-1] != x_tuple:
                        table.x_vals.append(x_tuple)
                    table.lines.setdefault(name, []).append(float(middle))
                    table.bars.setdefault(name, []).append(bar or None)
        return tables

    def run(
        self,
        show_plots: bool = False,
        print_data: bool = False,
        print_value_on_bar: bool = False,
        save_path: str | Path = "",
        return_df: bool = False,
        report_all_name: str = "",
        **kwargs: Any,
    ) -> list[Any] | None:
        """Runs all sweeps; every rank calls the function, rank 0 prints, writes and draws.

        With ``save_path`` each metric gets ``<plot_name>[-<metric>].csv`` and, with matplotlib, ``.png``;
        ``report_all_name`` adds a page with all of them. Keywords go to the function.

        Returns:
            The data frames if ``return_df`` (needs pandas), else None.
        """
        frames = []
        for bench in self.benchmarks:
            for metric, table in self.collect(bench, **kwargs).items():
                name = f"{bench.plot_name}-{metric}" if metric else bench.plot_name
                if return_df:
                    frames.append(table.to_df())
                if not _is_first_rank():
                    continue
                if print_data:
                    print(f"{name}:\n{table.text()}", flush=True)
                if save_path:
                    Path(save_path).mkdir(parents=True, exist_ok=True)
                    table.to_csv(Path(save_path) / f"{name}.csv")
                if show_plots or (save_path and _has_matplotlib()):
                    picture = Path(save_path) / f"{name}.png" if save_path else None
                    draw_table(table, bench, metric, picture, show_plots, print_value_on_bar)
        if report_all_name and save_path and _is_first_rank():
            report_all_from_perf(save_path, report_all_name)
        return frames if return_df else None

    @staticmethod
    def draw_from_csv(
        csv_path: str | Path,
        save_path: str | Path | None = None,
        show_plots: bool = False,
        print_value_on_bar: bool = False,
        **kwargs: Any,
    ) -> None:
        """Draws a file that ``run`` wrote, beside it unless ``save_path`` is given."""
        bench = Benchmark.from_csv(csv_path, **kwargs)
        picture = Path(csv_path).with_suffix(".png") if save_path is None else Path(save_path)
        draw_table(Table.from_csv(csv_path), bench, "", picture, show_plots, print_value_on_bar)


def perf_report(benchmarks: Benchmark | Sequence[Benchmark]) -> Callable[[Callable[..., Any]], Mark]:
    """Decorator that makes a ``Mark`` of a function."""
    return lambda fn: Mark(fn, benchmarks)


def _has_matplotlib() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw_table(
    table: Table, bench: Benchmark, metric: str, path: Path | None, show: bool, print_value_on_bar: bool
) -> None:
    """Lines over x, as groups of bars if x is no number or values are to be printed."""
    with drawn(path, size=(10, 6), show=show) as grid:
        _draw_lines(grid[0, 0], table, bench, metric, print_value_on_bar)


def _draw_lines(axes: Any, table: Table, bench: Benchmark, metric: str, print_value_on_bar: bool) -> None:
    numeric = len(table.x_names) == 1 and all(isinstance(x[0], (int, float)) for x in table.x_vals)
    labels = [", ".join(map(str, x)) for x in table.x_vals]
    for i, (name, values) in enumerate(table.lines.items()):
        colour, style = bench.styles[i] if bench.styles else (f"C{i}", "-")
        if numeric and not print_value_on_bar:
            xs = [x[0] for x in table.x_vals]
            axes.plot(xs, values, label=name, color=colour, linestyle=style)
            if all(bar is not None for bar in table.bars[name]):
                low, high = zip(*table.bars[name])
                axes.fill_between(xs, low, high, alpha=0.15, color=colour)
        else:
            width = 0.8 / len(table.lines)
            places = [x + (i + 0.5) * width - 0.4 for x in range(len(labels))]
            drawn = axes.bar(places, values, width, label=name, color=colour)
            if print_value_on_bar:
                axes.bar_label(drawn, fmt="%.3g", fontsize=7)
            axes.set_xticks(range(len(labels)), labels)
    ylabel = bench.ylabel if isinstance(bench.ylabel, str) else bench.ylabel.get(metric, metric)
    axes.set(title=bench.plot_name, xlabel=bench.xlabel or ", ".join(table.x_names), ylabel=ylabel or metric)
    if bench.x_log and numeric and not print_value_on_bar:
        axes.set_xscale("log")
    if bench.y_log:
        axes.set_yscale("log")
    axes.legend()


def make_img_grid(
    img_dir: str | Path,
    save_path: str | Path | None = None,
    layout: str = "wide",
    ignore_patterns: Sequence[str] = (),
    save_pdf: bool = False,
) -> None:
    """All pictures (png, jpg) in and below a folder in one, row by row; shown if ``save_path`` is None.

    ``layout`` is wide or tall. Files whose name begins with a pattern (regular expressions) are left out; with
    ``save_pdf`` the result is also written as PDF. Does nothing where there are no pictures.
    """
    if layout not in ("wide", "tall"):
        raise ContractError(f"layout={layout!r} is unknown; use 'wide' or 'tall'.")
    found = sorted(path for path in Path(img_dir).rglob("*") if path.suffix in (".png", ".jpg"))
    found = [path for path in found if not any(re.match(pattern, path.name) for pattern in ignore_patterns)]
    if save_path is not None:
        found = [path for path in found if path.resolve() != Path(save_path).resolve()]
    if not found:
        return
    few = max(n for n in range(1, math.isqrt(len(found)) + 1) if len(found) % n == 0)
    ncols = len(found) // few if layout == "wide" else few
    nrows = len(found) // ncols
    as_pdf = Path(save_path).with_suffix(".pdf") if save_pdf and save_path is not None else None
    with drawn(save_path, as_pdf, size=(8 * ncols, 5 * nrows), grid=(nrows, ncols)) as axes:
        for axis, path in zip(axes.flat, found):
            axis.axis("off")
            axis.imshow(pyplot().imread(path))


def report_all_from_perf(save_root: str | Path, report_all_name: str = "perf_report_all") -> Path:
    """Writes ``<report_all_name>.html`` with every table and picture of the folder; returns its path."""
    folder = Path(save_root)
    sections = []
    for path in sorted(folder.glob("*.csv")):
        picture = path.with_suffix(".png")
        shown = picture.read_bytes() if picture.exists() else None
        sections.append(Section(path.stem, "", shown, Table.from_csv(path).cells()))
    target = folder / f"{report_all_name}.html"
    target.write_text(page(report_all_name, "", [], sections), encoding="utf-8")
    return target
