"""Mutations of a reply as JSON: any place by any junk, and the fields that rules speak of by what they forbid."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence

from tests.tools.mutated_replies import tree
from tests.tools.mutated_replies.tree import Container, Node, Object

Mutation = Callable[[random.Random, Node], None]
Place = tuple[Container, int]

NUMBERS = (
    "0", "-0", "1", "-1", "7", "2.0", "-0.0", "1e3", "5e0", "1E2", "0.1e1", "1e999", "-1e999", "1e-999", "NaN",
    "Infinity", "-Infinity", "true", "false", "-9999", "-9999.0", "-9998.999", "-1e4", "2147483647", "2147483648",
    "-2147483648", "4294967296", str(2**53 + 1), str(2**63), str(2**70), "01", "+1", "1.", ".5", "0x10", "1_000",
    "-0." + "123456789" * 9, "-" + "9" * 400, "9" * 5000, "1e400", "4.9e-324", "-1.7976931348623157e308",
)  # fmt: skip
STRINGS = (
    '""', '"x"', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude80"', '"\\u0000"', '"\\u2028"', '"\\/"', '"\t"',
    '"\ud800"', '"Zürich 東京 🚀"', '"\\x"', '"\\u12"', '"unterminated', "'single'", '"assistant"', '"abort"', '"7"',
    '"' + "a" * 3000 + '"', '"\\"routed_experts\\":\\"AAAA\\""', '"\ufeff"', '"\x7f"', '"1e999"', '"null"',
)  # fmt: skip
SHAPES = (
    "null", "[]", "{}", "[[]]", "[null]", "[-1,3]", "[[-1,3]]", "[[-1,3],[-2,4]]", '{"a":1,"a":2}', '{"":null}', "",
    "tru", "[1,]", '{"a":1,}', "[1 2]", "/*c*/1", '{"role":"assistant"}', '{"role":"assistant","content":"x"}',
)  # fmt: skip
NAMES = (
    "choices", "message", "content", "meta_info", "completion_tokens", "output_token_logprobs", "prompt_token_ids",
    "token_ids", "logprobs", "weight_version", "weight_versions", "finish_reason", "routed_experts", "indexer_topk",
    "role", "tool_calls", "usage", "metadata", "", "__proto__", "type", "status",
)  # fmt: skip


def deep(rng: random.Random) -> str:
    """Lists or objects in each other, around the limit of 100 or far beyond it."""
    depth = rng.choice((20, 90, 95, 97, 98, 99, 100, 101, 150, 900, 5000))
    if rng.random() < 0.5:
        return "[" * depth + "]" * depth
    return '{"a":' * depth + "1" + "}" * depth


def junk(rng: random.Random) -> str:
    """The text of a value, often one that is no JSON."""
    pool: Sequence[str] = rng.choice((NUMBERS, NUMBERS, STRINGS, SHAPES, SHAPES))
    return deep(rng) if rng.random() < 0.04 else rng.choice(pool)


def _choice(root: Node) -> Node | None:
    choices = root.get("choices") if isinstance(root, Object) else None
    return choices[0] if isinstance(choices, list) and choices else None


def choice_of(root: Node) -> Object | None:
    """The first choice, where it still is an object."""
    found = _choice(root)
    return found if isinstance(found, Object) else None


def meta_of(root: Node) -> Object | None:
    """SGLang's `meta_info`."""
    choice = choice_of(root)
    found = choice.get("meta_info") if choice else None
    return found if isinstance(found, Object) else None


def home_of(root: Node) -> Object | None:
    """Where ids and payloads stand: SGLang's `meta_info`, vLLM's choice."""
    return meta_of(root) or choice_of(root)


def message_of(root: Node) -> Object | None:
    """The assistant's message."""
    choice = choice_of(root)
    found = choice.get("message") if choice else None
    return found if isinstance(found, Object) else None


def prompt_of(root: Node) -> list[Node]:
    """The prompt's ids, wherever the dialect has them."""
    holders = (choice_of(root), root if isinstance(root, Object) else None)
    found = [holder.get("prompt_token_ids") for holder in holders if holder]
    return next((ids for ids in found if isinstance(ids, list)), [])


def entries_of(root: Node) -> list[Node]:
    """SGLang's triples or vLLM's objects, one an output token."""
    meta, choice = meta_of(root), choice_of(root)
    found = meta.get("output_token_logprobs") if meta else None
    if meta is None and choice is not None:
        logprobs = choice.get("logprobs")
        found = logprobs.get("content") if isinstance(logprobs, Object) else None
    return found if isinstance(found, list) else []


def output_of(root: Node) -> list[Place]:
    """The places of the output's token ids."""
    choice = choice_of(root)
    ids = choice.get("token_ids") if choice else None
    if isinstance(ids, list):
        return [(ids, place) for place in range(len(ids))]
    return [(entry, 1) for entry in entries_of(root) if isinstance(entry, list) and len(entry) > 1]


def replace(rng: random.Random, root: Node) -> None:
    """Any value by junk."""
    found = tree.pick(rng, root)
    if found:
        tree.put(*found, junk(rng))


def drop(rng: random.Random, root: Node) -> None:
    """A key or an entry is gone."""
    found = tree.pick(rng, root)
    if found:
        tree.remove(*found)


def twice(rng: random.Random, root: Node) -> None:
    """A key or an entry a second time, before or behind the first; often with another value."""
    found = tree.pick(rng, root)
    if not found:
        return
    container, place = found
    node = tree.twin(tree.child(container, place)) if rng.random() < 0.5 else junk(rng)
    key = container.pairs[place][0] if isinstance(container, Object) else ""
    if rng.random() < 0.3:
        key = escaped(rng, key)
    tree.insert(container, place + rng.randint(0, 1), node, key)


def rename(rng: random.Random, root: Node) -> None:
    """Another key: one that is known elsewhere, the same in capitals, or the same spelled with escapes."""
    found = tree.pick(rng, root)
    container = found[0] if found else None
    if found and isinstance(container, Object):
        key, node = container.pairs[found[1]]
        other = rng.choice((tree.text(rng.choice(NAMES)), key.upper(), escaped(rng, key)))
        container.pairs[found[1]] = (other, node)


def move(rng: random.Random, root: Node) -> None:
    """A subtree goes to another place, or a copy of it does."""
    source, target = tree.pick(rng, root), tree.pick(rng, root)
    if not source or not target:
        return
    container, place = source
    key = container.pairs[place][0] if isinstance(container, Object) else tree.text(rng.choice(NAMES))
    node = tree.twin(tree.child(container, place))
    if rng.random() < 0.6:
        tree.remove(container, place)
    tree.insert(target[0], min(target[1], tree.size(target[0])), node, key)


def swap(rng: random.Random, root: Node) -> None:
    """Two entries of a list, or two values of an object, change places."""
    found = tree.pick(rng, root)
    if found and tree.size(found[0]) > 1:
        container, place = found
        other = rng.randrange(tree.size(container))
        one, two = tree.child(container, place), tree.child(container, other)
        tree.put(container, place, two)
        tree.put(container, other, one)


def number(rng: random.Random, root: Node) -> None:
    """A number anywhere."""
    found = [spot for spot in tree.places(root) if str(tree.child(*spot))[:1] in "-0123456789"]
    if found:
        tree.put(*rng.choice(found), rng.choice(NUMBERS))


def string(rng: random.Random, root: Node) -> None:
    """A string anywhere."""
    found = [spot for spot in tree.places(root) if str(tree.child(*spot))[:1] == '"']
    if found:
        tree.put(*rng.choice(found), rng.choice(STRINGS))


def nest(rng: random.Random, root: Node) -> None:
    """Deep JSON at a place that may hold any, or around what is there."""
    found = tree.pick(rng, root)
    if found:
        if rng.random() < 0.5:
            tree.insert(*found, deep(rng))
        else:
            depth = rng.choice((1, 2, 90, 97, 100, 101))
            tree.put(*found, "[" * depth + tree.render(tree.child(*found)) + "]" * depth)


def escaped(rng: random.Random, raw: str) -> str:
    """The same JSON string with some of its characters as escapes."""
    if not raw.startswith('"') or "\\" in raw:
        return raw
    letters = [
        json.dumps(letter, ensure_ascii=True)[1:-1] if ord(letter) > 126 else
        "\\/" if letter == "/" else f"\\u{ord(letter):04x}" if rng.random() < 0.3 else letter
        for letter in raw[1:-1]
    ]  # fmt: skip
    return '"' + "".join(letters) + '"'


def respell(rng: random.Random, root: Node) -> None:
    """Keys and strings with escapes: other bytes, the same JSON."""
    found = list(tree.places(root))
    for container, place in rng.sample(found, min(len(found), rng.choice((1, 3, 20)))):
        if isinstance(container, Object):
            key, node = container.pairs[place]
            container.pairs[place] = (escaped(rng, key), node)
        node = tree.child(container, place)
        if isinstance(node, str):
            tree.put(container, place, escaped(rng, node))


def count(rng: random.Random, root: Node) -> None:
    """`completion_tokens`, `prompt_tokens` and the like, wherever they are."""
    found = [
        (container, place)
        for container, place in tree.places(root)
        if isinstance(container, Object) and container.pairs[place][0].endswith('_tokens"')
    ]
    if found:
        spot = rng.choice(found)
        old = str(tree.child(*spot))
        near = [str(int(old) + step) for step in (-1, 1, 2)] if old.isdigit() else []
        tree.put(*spot, rng.choice((*near, f"{old}.0", f"{old}e0", f'"{old}"', f"0{old}", f"-{old}", junk(rng))))


def logprob(rng: random.Random, root: Node) -> None:
    """One token's logprob."""
    found: list[Place] = []
    for entry in entries_of(root):
        if isinstance(entry, Object):
            found += [(entry, place) for place, (key, _) in enumerate(entry.pairs) if key == '"logprob"']
        elif isinstance(entry, list) and entry:
            found.append((entry, 0))
    if found:
        sound = (
            "1e-4",
            "9e-5",
            repr(-rng.random() * 10 ** rng.randint(-300, 3)),
            f"-0.{rng.randrange(10**30):030}",
            "-3",
            "5e-1",
        )
        tree.put(*rng.choice(found), rng.choice((*sound, *NUMBERS, junk(rng))))


def agree(rng: random.Random, root: Node) -> None:
    """Copies of the ids and counts are mended after them, mostly; a copy that is not there may be added."""
    choice, meta = choice_of(root), meta_of(root)
    if choice is None or not isinstance(root, Object) or rng.random() < 0.2:
        return
    output: Node = [tree.twin(tree.child(*spot)) for spot in output_of(root)]
    prompt = list(prompt_of(root))
    if choice.get("response_token_ids") is not None or rng.random() < 0.2:
        choice.set("response_token_ids", output)
    if rng.random() < 0.1:
        rng.choice((choice, root)).set("prompt_token_ids", list(prompt))
    for home in (meta, root.get("usage")):
        if isinstance(home, Object):
            home.set("prompt_tokens", str(len(prompt)))


def copy(rng: random.Random, root: Node) -> None:
    """A second copy of ids, which says the same or something else."""
    choice = choice_of(root)
    if choice is None or not isinstance(root, Object):
        return
    ids = [*prompt_of(root)] if rng.random() < 0.5 else [tree.twin(tree.child(*spot)) for spot in output_of(root)]
    if rng.random() < 0.5:
        ids.insert(rng.randint(0, len(ids)), rng.choice(("7", "-0", "null", "[]")))
    name = rng.choice(("prompt_token_ids", "response_token_ids", "token_ids"))
    home = rng.choice((root, choice, meta_of(root) or choice))
    (home.add if rng.random() < 0.3 else home.set)(name, list(ids))


def token_id(rng: random.Random, root: Node) -> None:
    """An id of the prompt or the output: another, or none."""
    _token_id(rng, root)
    agree(rng, root)


def _token_id(rng: random.Random, root: Node) -> None:
    prompt = prompt_of(root)
    found: list[Place] = [(prompt, place) for place in range(len(prompt))] if rng.random() < 0.5 else output_of(root)
    if not found:
        return
    container, place = rng.choice(found)
    match rng.randrange(4):
        case 0:
            tree.put(container, place, str(rng.randrange(2**31)))
        case 1 if container is prompt:
            tree.insert(container, place, str(rng.randrange(2**31)))
        case 2 if container is prompt:
            tree.remove(container, place)
        case _:
            tree.put(container, place, rng.choice((*NUMBERS, junk(rng))))


def length(rng: random.Random, root: Node) -> None:
    """Output entries more or fewer, the count sometimes adjusted so that all agrees again."""
    entries = entries_of(root)
    if not entries:
        return
    if rng.random() < 0.5:
        entries.pop(rng.randrange(len(entries)))
    else:
        entries.insert(rng.randrange(len(entries)), tree.twin(rng.choice(entries)))
    home = meta_of(root)
    if home and rng.random() < 0.6:
        home.set("completion_tokens", str(len(entries)))
        agree(rng, root)


def message(rng: random.Random, root: Node) -> None:
    """Role, content, reasoning and tool calls."""
    found = message_of(root)
    if not found:
        return
    name = rng.choice(("role", "content", "content", "reasoning_content", "tool_calls", "tool_calls", "reasoning"))
    calls = (
        "null", "[]", "[{}]", "[1]", "{}", '"x"', '[{"id":"a"}]', '[{"function":5}]', '[{"function":null}]',
        '[{"id":1,"type":"function","function":{"name":"f","arguments":"{\\"a\\":1e400}"}}]',
        '[{"id":"c","function":{"name":"f","arguments":{"a":[1,2.0]}}}]', "[null]", "[[]]",
        '[{"id":"c","function":{"name":"f","arguments":"' + "[" * 3000 + '"}}]',
        '[{"id":"c","function":{"name":"f","arguments":"{\\"a\\":\\"\\\\ud800\\"}"}}]',
        '[{"id":"c","function":{"name":"f","arguments":"' + "9" * 5000 + '"}}]',
        '[{"id":"c","routed_experts":"AAAA","function":{"name":null,"arguments":null}}]',
    )  # fmt: skip
    roles = ('"assistant"', '"user"', '"Assistant"', "null", '""', '"assistant "', '"\\u0061ssistant"')
    contents = ("null", '""', '" "', '[{"type":"text","text":"x"}]', '"\\u00e9"', '"a\\u0000b"', '"\u2028"', "5")
    pool = {"role": roles, "content": contents, "tool_calls": calls}.get(name, ("null", '""', '"thought"', "5", "[]"))
    found.set(name, junk(rng) if rng.random() < 0.2 else rng.choice(pool))
    if rng.random() < 0.1:
        found.add("function_call", rng.choice(("null", "{}", '{"name":"f","arguments":"{}"}', "5")))


def version(rng: random.Random, root: Node) -> None:
    """The weight version, or the spans of several."""
    meta = meta_of(root)
    output = len(entries_of(root))
    if meta is None or rng.random() < 0.2:
        if isinstance(root, Object):
            named = '{"weight_version":' + rng.choice(('"8"', "9", "null", "1.5", "true")) + "}"
            root.set("metadata", rng.choice((named, named, "[]", "null", junk(rng))))
        return
    names = (
        '"12"', '"007"', '"-1"', '"v1"', '""', '"²"', '"٣"', '"unknown"', "12", "-0", "1.5", "null", "true", '"1.0"',
        tree.text("9" * 25), tree.text("9" * 5000), "9" * 25, str(2**63), str(2**64), '"a\\u0000"', '"step-🚀"', "[]",
    )  # fmt: skip
    if rng.random() < 0.5:
        meta.set("weight_version", rng.choice(names))
        if rng.random() < 0.7:
            meta.set("weight_versions", "null")
        return
    cut = rng.randint(0, output)
    ends = rng.choice(((cut, output), (cut, output), (output,), (cut, cut, output), (output + 1,), (cut,), ()))
    starts = (0, *ends[:-1]) if rng.random() < 0.8 else tuple(end + rng.randint(-1, 1) for end in (0, *ends[:-1]))
    spans = [
        Object([('"version"', rng.choice(names)), ('"start"', str(start)), ('"end"', str(end))])
        for start, end in zip(starts, ends, strict=False)
    ]
    meta.set("weight_versions", list(spans))


def finish(rng: random.Random, root: Node) -> None:
    """The reason that the generation ended, in one or both of its places."""
    reasons = ('"stop"', '"length"', '"abort"', '"tool_calls"', '""', '"Abort"', "null", "5", "{}", '"é\\u0000"')
    choice, meta = choice_of(root), meta_of(root)
    if choice and rng.random() < 0.8:
        choice.set("finish_reason", rng.choice(reasons))
    if meta and rng.random() < 0.6:
        typed = '{"type":' + rng.choice(reasons) + "}"
        meta.set("finish_reason", rng.choice((typed, *reasons, '{"type":"stop","type":"abort"}', "[]")))


MUTATIONS: Mapping[str, Mutation] = {
    "json: replace": replace,
    "json: drop": drop,
    "json: twice": twice,
    "json: rename": rename,
    "json: move": move,
    "json: swap": swap,
    "json: number": number,
    "json: string": string,
    "json: nest": nest,
    "json: respell": respell,
    "json: count": count,
    "json: copy": copy,
    "json: logprob": logprob,
    "json: token id": token_id,
    "json: length": length,
    "json: message": message,
    "json: weight version": version,
    "json: finish reason": finish,
}
