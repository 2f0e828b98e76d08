"""`cula bench --html`: a run as one small page that needs no other file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cula.bench.records import Record, is_ours
from cula.bench.report import COLUMNS, cells, title

STYLE = """
:root { color-scheme: light dark; --ours: #1f6fd0; --peer: #c8501e; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.05rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
tr.ours td { font-weight: 600; }
td.bar { width: 24%; min-width: 8rem; }
td.bar span { display: block; height: .8rem; border-radius: 2px; background: var(--peer); }
tr.ours td.bar span { background: var(--ours); }
p.facts { color: #777; }
"""


def write(records: Sequence[Record], lines: Sequence[str], path: Path) -> None:
    """Write the page. lines: facts of the run, one paragraph each. The file appears whole or not at all."""
    sections = "\n".join(_section(records, group) for group in dict.fromkeys((r.op, r.case) for r in records))
    facts = "".join(f"<p class=facts>{escape(line)}</p>\n" for line in lines)
    page = (
        "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n"
        "<meta name=viewport content='width=device-width, initial-scale=1'>\n"
        f"<title>cula bench</title>\n<style>{STYLE}</style>\n<h1>cula bench</h1>\n{facts}{sections}\n</html>\n"
    )
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(page, encoding="utf-8")
    fresh.replace(path)


def _section(records: Sequence[Record], group: tuple[str, str]) -> str:
    rows = [r for r in records if (r.op, r.case) == group]
    head = "".join(f"<th>{escape(name)}</th>" for name in (*COLUMNS, "ms, logarithmic"))
    body = "\n".join(_row(record, rows) for record in rows)
    return f"<h2>{escape(title(rows[0]))}</h2>\n<div class=wide><table>\n<tr>{head}</tr>\n{body}\n</table></div>"


def _row(record: Record, rows: Sequence[Record]) -> str:
    values = "".join(f"<td>{escape(text)}</td>" for text in (record.gate, *cells(record, rows)))
    width = _width(record, rows)
    bar = f"<td class=bar><span style='width:{width:.0f}%'></span></td>" if width else "<td class=bar></td>"
    return f"<tr{' class=ours' if is_ours(record) else ''}>{values}{bar}</tr>"


def _width(record: Record, rows: Sequence[Record]) -> float:
    """Length of the row's bar in percent: logarithmic between 60% of the least time and the most."""
    times = [r.ms for r in rows if r.ms]
    if not record.ms:
        return 0.0
    low, high = 0.6 * min(times), max(times)
    return 100 * math.log(record.ms / low) / math.log(high / low)
