"""A lead with sub-agents who read the literature, and an agent in a browser."""

from __future__ import annotations

import json
import random

from ops.demo.stories.script import Agent, Call, Session, Turn, chance, tool

RESEARCH_GROUP, WEB_GROUP = "research/reef-recovery", "web/flight-booking"

RESEARCH_TOOLS = (
    tool("spawn_agent", "Start a sub-agent on a question.", name="Its name.", task="What to find out."),
    tool("search", "Search the web.", query="Words."),
    tool("fetch", "A page as text.", url="Its address."),
)
LEAD = "You lead a research team. Split the question, start sub-agents, then write a report with sources."
QUESTION = "Which coral reefs recovered after the bleaching of 2016, and **why** did these and not others?"
FOCUS = {
    "surveys": "Which long-term surveys report coral cover before and after 2016?",
    "heat": "How large was the heat stress of each reef in 2016 and after?",
    "herbivores": "What is known about grazing fish and the recovery of corals?",
}
FINDING = """**{focus}**: in short, {count} sources agree.

- Remote reefs regained most of their cover within {years} years.
- Reefs near rivers did not: *sediment*, and fewer grazing fish.

> "Recovery was fastest where heat stress stayed below eight degree weeks."

Sources: [1] survey 2015-2024, [2] review of {count} studies."""
PAGE = """Coral cover by year
2015  34.1 %   before
2016  12.7 %   after the heat wave
2018  15.2 %
2020  21.9 %
2022  29.4 %
2024  33.0 %
The transects were swum twice a year at 5 and 10 m. """
SUMMARY = """# Summary so far

- Three agents have reported; heat stress alone explains about half of the differences.
- Open: does protection of herbivores help where rivers bring sediment?

Next: check the two sites that contradict each other, then write the report."""
REPORT = """# Reefs that recovered after 2016

## Answer

Remote reefs with many grazing fish recovered within **six to eight years**; reefs near rivers did not.

## Why

1. *Heat*: below eight degree weeks most colonies live.
2. *Herbivores*: they keep algae from taking the free space.
3. *Water*: sediment and nutrients slow young corals.

| reef | 2015 | 2016 | 2024 |
| --- | ---: | ---: | ---: |
| Remote north | 34 % | 13 % | 33 % |
| River mouth | 31 % | 14 % | 15 % |

```json
{"confidence": 0.7, "sources": 14}
```"""


def _search(query: str, rng: random.Random) -> Call:
    hits = [
        {
            "title": f"{query.split()[-1].capitalize()} of reefs, part {n}",
            "url": f"https://reefs.example/{rng.randint(100, 999)}",
        }
        for n in range(4)
    ]
    return Call("search", {"query": query}, json.dumps(hits), rng.uniform(0.3, 1.2))


def _fetch(rng: random.Random, length: int = 6) -> Call:
    url = f"https://reefs.example/{rng.randint(1000, 9999)}"
    return Call("fetch", {"url": url}, f"# {url}\n\n{PAGE * length}", rng.uniform(0.4, 1.6))


def research(count: int = 4) -> list[Session]:
    sessions = []
    for attempt in range(count):
        rng = chance(RESEARCH_GROUP, attempt)
        names = list(FOCUS)[: 2 if attempt == 3 else 3]
        agents = [
            Agent(
                name,
                f"You are the agent `{name}` of a research team. Answer with sources.",
                [
                    Turn(
                        "I'll search for it.",
                        ask=FOCUS[name],
                        calls=[_search(f"coral {name}", rng), _search(f"2016 bleaching {name}", rng)],
                    ),
                    Turn(calls=[_fetch(rng, 4 + 4 * number) for number in range(1 + rng.randint(0, 2))]),
                    *[Turn("", "The numbers of two surveys differ; I need the raw table.", [_fetch(rng, 12)])]
                    * (attempt % 2),
                    Turn(FINDING.format(focus=name, count=rng.randint(3, 14), years=rng.randint(5, 9))),
                ],
            )
            for name in names
        ]
        spawned = [
            Call("spawn_agent", {"name": a.name, "task": FOCUS[a.name]}, str(a.turns[-1].text), 0.3) for a in agents
        ]
        turns = [
            Turn(
                "I split this into parts, and start an agent for each.",
                "What decides recovery? Heat, fish, water.",
                spawned,
                QUESTION,
            ),
            Turn(
                "Two sites contradict each other, I look at them myself.",
                calls=[_fetch(rng, 20), _search("river mouth reef", rng)],
            ),
            *[Turn(fault="status_503")] * (attempt == 2),
            Turn(calls=[_fetch(rng, 24)]),
        ]
        last = [Turn("", "Sediment explains the second site.", [_search("sediment coral recruits", rng)]), Turn(REPORT)]
        sessions.append(
            Session(
                {
                    "session_id": f"research-reefs-{attempt:02}",
                    "group_id": RESEARCH_GROUP,
                    "attempt": attempt,
                    "history": "tree",
                    "metadata": {"task": "reef-recovery", "harness": "team", "split": "eval"},
                },
                LEAD,
                turns,
                RESEARCH_TOOLS,
                agents=agents,
                compacted=last,
                reward=(0.8, 0.55, 0.7, 0.2)[attempt],
                components={"coverage": (0.9, 0.6, 0.8, 0.2)[attempt], "citations": (0.7, 0.5, 0.6, 0.2)[attempt]},
                notes={"tags": ["tree", "compacted"]},
            )
        )
    return sessions


WEB_TOOLS = (
    tool("goto", "Open an address.", url="Address."),
    tool("click", "Click an element.", ref="Its number."),
    tool("type", "Type into an element.", ref="Its number.", text="Text."),
)
WEB_TASK = "Find the cheapest direct flight from Lisbon to Oslo on 12 June, at most 250 EUR, and stop at the payment."


def _screen(title: str, rng: random.Random, rows: int) -> str:
    """A page as its tree of elements."""
    lines = [f'- document "{title}"', "  - banner", '    - link [1] "Flights"', '    - link [2] "Stays"', "  - main"]
    for n in range(rows):
        price, hour, stops = (rng.randint(120, 420), rng.randint(5, 22), rng.choice(("direct", "1 stop")))
        lines.append(f'    - article [{10 + n}] "{hour:02}:{rng.choice("0134")}5 LIS → OSL, {stops}, {price} EUR"')
    return "\n".join(lines)


def web(count: int = 6) -> list[Session]:
    sessions = []
    for attempt in range(count):
        rng = chance(WEB_GROUP, attempt)
        turns = [
            Turn(ask=WEB_TASK, calls=[Call("goto", {"url": "https://fly.example"}, _screen("fly", rng, 0), 1.1)]),
            Turn(
                calls=[
                    Call("type", {"ref": "3", "text": "Lisbon"}, "typed", 0.3),
                    Call("type", {"ref": "4", "text": "Oslo"}, "typed", 0.3),
                ]
            ),
            Turn(
                "Now the list of flights.",
                calls=[Call("click", {"ref": "7"}, _screen("results", rng, 90), rng.uniform(1, 2.6))],
            ),
        ]
        turns += [
            Turn(
                "",
                "None of these is direct and below 250. Next page.",
                [Call("click", {"ref": "99"}, _screen(f"results {page}", rng, 60), rng.uniform(0.8, 2))],
            )
            for page in range(2, 2 + attempt % 3)
        ]
        if attempt == 1:
            turns.append(Turn(calls=[Call("click", {"ref": "1012"}, "Error: element 1012 is not on this page", 0.5)]))
        if attempt == 4:
            turns.append(Turn("I'll wait for the page.", fault="reset"))
        turns += [
            Turn(
                "This one is direct and in the budget.",
                calls=[Call("click", {"ref": str(10 + attempt)}, _screen("payment", rng, 1), 1.3)],
            ),
            Turn(f"I stopped at the payment. The flight is **direct** and costs *{180 + 9 * attempt} EUR*."),
        ]
        sessions.append(
            Session(
                {
                    "session_id": f"web-flights-{attempt:02}",
                    "group_id": WEB_GROUP,
                    "attempt": attempt,
                    "metadata": {"task": "flight-booking", "harness": "browser", "split": "eval"},
                },
                "You use a browser through its tree of elements.",
                turns,
                WEB_TOOLS,
                reward=1.0,  # all are equal: a group that teaches nothing
                components={"reached": 1.0},
            )
        )
    return sessions
