"""The server's OpenAPI document as an HTML page. It has no scripts, and loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from html import escape
from typing import Any

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""Of the answer with the page: browsers load nothing for it."""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em }}
table {{ border-collapse: collapse }}
td {{ border-bottom: 1px solid #8888; padding: .2em 1em .2em 0; vertical-align: top }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{description} All bodies are JSON. <a href="/openapi.json">openapi.json</a> describes the same for programs.</p>
{requests}
<h2>Bodies</h2>
{bodies}
</body>
</html>
"""


def interface_page(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document of FastAPI."""
    info = document["info"]
    requests = [
        _request(f"{method.upper()} {path}", found)
        for path, item in document["paths"].items()
        for method, found in item.items()
    ]
    bodies = [_body(name, found) for name, found in document["components"]["schemas"].items()]
    return _PAGE.format(
        title=escape(info["title"]),
        description=_prose(info["description"]),
        requests="\n".join(requests),
        bodies="\n".join(bodies),
    )


def _request(name: str, found: Mapping[str, Any]) -> str:
    names: dict[str, list[str]] = defaultdict(list)  # of bodies: "request", or statuses of answers
    if "requestBody" in found:
        names[_content(found["requestBody"])].append("request")
    for status, answer in found["responses"].items():
        names[_content(answer)].append(status)
    rows = [_row(", ".join(alike), body) for body, alike in names.items()]
    return f"<h2><code>{escape(name)}</code></h2>\n<p>{_prose(found['description'])}</p>\n{_table(rows)}"


def _content(found: Mapping[str, Any]) -> str:
    return " or ".join(_type(each["schema"]) for each in found.get("content", {}).values()) or "no body"


def _body(name: str, found: Mapping[str, Any]) -> str:
    required = found.get("required", ())
    rows = [
        _row(f"<code>{escape(field)}</code>", _type(each), _default(each, field in required), _prose(_text(each)))
        for field, each in found["properties"].items()
    ]
    return f'<h3 id="{escape(name)}">{escape(name)}</h3>\n<p>{_prose(_text(found))}</p>\n{_table(rows)}'


def _type(schema: Mapping[str, Any]) -> str:
    if reference := schema.get("$ref", "").rpartition("/")[2]:
        return f'<a href="#{escape(reference)}">{escape(reference)}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"<code>{escape(value)}</code>" for value in schema["enum"])
    least = f", at least {schema['minimum']:g}" if "minimum" in schema else ""
    return f"{schema.get('type', 'any value')}{least}"


def _default(schema: Mapping[str, Any], is_required: bool) -> str:
    if is_required:
        return "required"
    return f"default <code>{escape(json.dumps(schema['default']))}</code>" if "default" in schema else "optional"


def _text(schema: Mapping[str, Any]) -> str:
    return str(schema.get("description", ""))


def _prose(text: str) -> str:
    """Return the text of a docstring as HTML."""
    return re.sub(r"``(.*?)``", r"<code>\1</code>", escape(text))


def _table(rows: list[str]) -> str:
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _row(*cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
