"""Values that are legal JSON, or nearly, and that some container or shape cannot hold."""

from __future__ import annotations

import random

NUMBERS = (
    *("0", "-0.0", "1", "0.7", "1.5", "5e-324", "1e-400", "1e308", "-1e308", "1e999", "-1e999", "3.4e38", "3.5e38"),
    *("9223372036854775808", "18446744073709551615", "18446744073709551616", "-9223372036854775809"),
    *("1" * 400, "1" * 5000, "0." + "1" * 5000),
)
TEXTS = ('""', r'"a\u0000b"', r'"\ud800"', r'"\udc00\ud800"', '"\u2028\x85"', r'"\uffff\\\"\n"', f'"{"x" * 7000}"')
OTHERS = ("null", "true", "[]", "{}")

SAMPLED = ("temperature", "top_p", "top_k", "min_p")
PARAMS = (*SAMPLED, "seed", "presence_penalty", "min_tokens", "user", "x", "chat_template_kwargs", "logit_bias")
KEYS = ('"k"', '"session_id"', '"turnlog"', '"excluded"', '"cursor"', '"env_name"', r'"a\u0000b"', r'"\ud800"', '""')


class Odd(random.Random):
    """Raw JSON of a seed."""

    def scalar(self) -> str:
        return self.choice(self.choice((NUMBERS, NUMBERS, TEXTS, OTHERS)))

    def value(self, depth: int = 2) -> str:
        kind = self.randrange(6) if depth else 0
        if kind == 4:
            return f"[{','.join(self.value(depth - 1) for _ in range(self.randrange(4)))}]"
        return self.object(depth - 1) if kind == 5 else self.scalar()

    def object(self, depth: int = 1) -> str:
        members = [f"{self.choice(KEYS)}:{self.value(depth)}" for _ in range(self.randrange(1, 4))]
        return "{" + ",".join(members) + "}"

    def params(self) -> str:
        """Members of a request's object, perhaps none, each after a comma."""
        names = self.sample(PARAMS, self.randrange(3))
        return "".join(f',"{name}":{self.choice(NUMBERS) if name in SAMPLED else self.value()}' for name in names)

    def rarely(self, text: str) -> str:
        return text if self.random() < 0.3 else ""

    def message(self) -> str:
        content = self.choice(('"Hello"', '"Hello"', *TEXTS, '[{"type":"text","text":"Hello"}]'))
        return f'{{"role":"user","content":{content}{self.rarely(f",{self.choice(KEYS)}:{self.value()}")}}}'

    def tools(self) -> str:
        schema = f'{{"type":"object","properties":{{}},"default":{self.value()}}}'
        return f',"tools":[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]'
