"""Page: an inspection as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from html import escape

from oscar_mm.inspect.tables import Table

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
  max-width: 68rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.25rem; }
.what { color: #555; margin-top: 0; }
.verdict { background: #eef5fb; border-left: 0.3rem solid #0072b2; padding: 0.75rem 1rem;
  font-size: 1.1rem; }
img { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: #555; padding: 0.75rem 0; }
th, td { text-align: right; padding: 0.25rem 0.75rem; border-bottom: 1px solid #e0e0e0; }
th { border-bottom: 2px solid #888; }
th:first-child, td:first-child { text-align: left; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, what: str, said: list[str], figure: bytes, tables: list[Table]) -> str:
    """The page.

    Args:
        title: its heading.
        what: a line below it.
        said: sentences, the verdict first.
        figure: PNG.
        tables: below the figure.
    """
    image = base64.b64encode(figure).decode()
    verdict, *others = map(escape, said)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="what">{escape(what)}</p>
<p class="verdict">{verdict}</p>
<ul>
{"".join(f"<li>{one}</li>" for one in others)}
</ul>
<img alt="Norms of keys, errors of attention and channel outliers by layer; the tables below have
the same figures" src="data:image/png;base64,{image}">
{"".join(map(_table, tables))}
</body>
</html>
"""


def _table(table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in table.heads)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    return (
        f'<div class="wide"><table><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
