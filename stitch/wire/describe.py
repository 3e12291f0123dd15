"""The events for people: `python -m stitch.wire.describe > docs/events.md` writes the page from the schemas that ship."""

from __future__ import annotations

from typing import Any, Final

from stitch.wire.schemas import Registry, Schema, registry

PLACES: Final = {
    "run_claimed": ("publications", "policy"),
    "version_published": ("publications", "policy"),
    "anchor_added": ("publications", "policy"),
    "channel_moved": ("publications", "policy"),
    "version_quarantined": ("publications", "policy"),
    "version_retired": ("publications", "policy"),
    "format_raised": ("publications", "`*`"),
    "channel_pointer": ("pointers", "policy/channel"),
    "replica_state": ("activations", "replica"),
    "rollout_served": ("rollouts", "request_id"),
}
"""Stream and record key of each event, in the order of the page. A test holds it to what is written."""

_HEAD: Final = """# Events

Made by `python -m stitch.wire.describe > docs/events.md` from `schemas/`; edit those.

Everything that Stitch knows is in these events. The publications are decisions: `stitch/core/lineage.py` says which of them count.
The others tell what followed from them, and a reader may do without.

A record's value is Avro in single-object encoding: `C3 01`, the 8 bytes of the schema's fingerprint (CRC-64-AVRO), the body. Its
headers are CloudEvents attributes: `ce_id` (the event id), `ce_type`, `ce_source`, `ce_time`, `ce_specversion`, `content-type`
(`application/avro`), `ce_stitchoptional` where a reader may skip what it cannot read, and `traceparent` where the writer had one.
A schema is used only once the log states its format level (docs/adr/0005-format-levels.md).
"""


def page(schemas: Registry) -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD, _contents(schemas)]
    parts += [_event(schemas.versions[event]) for event in PLACES]
    shared = _shared(schemas)
    parts.append("## Values within events\n\n" + "\n".join(_record(shared[name]) for name in sorted(shared)))
    return "\n".join(parts)


def _contents(schemas: Registry) -> str:
    rows = [
        f"| [{_name(schemas.newest[event])}](#{_name(schemas.newest[event]).lower()}) | {stream} | {key} "
        f"| {_cell(schemas.newest[event].raw['doc'])} |"
        for event, (stream, key) in PLACES.items()
    ]
    return "\n".join(["| event | stream | key | says |", "|---|---|---|---|", *rows, ""])


def _event(versions: list[Schema]) -> str:
    newest = versions[-1]
    stream, key = PLACES[newest.event]
    history = "; ".join(f"`{each.type}` (`{each.fingerprint.hex()}`), from format level {each.level}" for each in versions)
    return f"## {_name(newest)}\n\n{newest.raw['doc']}\n\nStream {stream}, key {key}. {history}.\n\n{_fields(newest.raw)}"


def _record(raw: dict[str, Any]) -> str:
    return f"### {raw['name']}\n\n{raw['doc']}\n\n{_fields(raw)}"


def _fields(raw: dict[str, Any]) -> str:
    rows = [f"| `{f['name']}` | {_type(f['type'])} | {_cell(f['doc'])}{_default(f)} |" for f in raw["fields"]]
    return "\n".join(["| field | type | says |", "|---|---|---|", *rows, ""])


def _default(field: dict[str, Any]) -> str:
    """A null that is a default is told by the type already."""
    if field.get("default") is None:
        return ""
    return f" Default: `{field['default']!r}`."


def _type(type_: Any) -> str:
    if isinstance(type_, list):
        return " or ".join(_type(each) for each in sorted(type_, key=lambda each: each == "null"))
    if isinstance(type_, str):
        name = type_.rpartition(".")[2]
        return name if name == type_ else _link(name)
    match type_["type"]:
        case "record":
            return _link(type_["name"])
        case "enum":
            return "one of " + ", ".join(f"`{symbol}`" for symbol in type_["symbols"])
        case "array":
            return f"list of {_type(type_['items'])}"
        case "map":
            return f"map of {_type(type_['values'])}"
        case plain:
            return str(plain)


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _shared(schemas: Registry) -> dict[str, dict[str, Any]]:
    """The records within events, by name; the newest definition of each."""
    found: dict[str, dict[str, Any]] = {}
    for event in PLACES:
        nodes: list[Any] = [field["type"] for field in schemas.newest[event].raw["fields"]]
        while nodes:
            node = nodes.pop()
            if isinstance(node, list):
                nodes += node
            elif isinstance(node, dict):
                if node["type"] == "record":
                    found[node["name"]] = node
                nodes += [node[inner] for inner in ("items", "values") if inner in node]
                nodes += [field["type"] for field in node.get("fields", ())]
    return found


def _name(schema: Schema) -> str:
    return str(schema.raw["name"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(registry()), end="")
