"""A path convertor for names of adapters and groups, which may contain any character, also slashes and line feeds."""

from __future__ import annotations

from starlette.convertors import Convertor, register_url_convertor


class NameConvertor(Convertor[str]):
    """Starlette's own `path` stops at a line feed, so such a name could not be requested."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


ANY = "anyname"
"""Name of the convertor in a route: `{group_id:anyname}`."""

register_url_convertor(ANY, NameConvertor())
