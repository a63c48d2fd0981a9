"""Names in paths: of adapters and groups, which may hold anything, slashes and line feeds too."""

from __future__ import annotations

from starlette.convertors import Convertor, register_url_convertor


class NameConvertor(Convertor[str]):
    """Starlette's own `path` ends at a line feed, and what is named so could not be asked for."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


ANY = "anyname"
"""As in `{group_id:anyname}`."""

register_url_convertor(ANY, NameConvertor())
