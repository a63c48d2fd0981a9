"""Harnesses that send several conversations to one session: no sampled token is lost, whatever becomes of a request.

By default what diverges is refused; with `on_divergence: "segment"` all of it is kept. The table at the end of the
run says what each session kept. Each case drives the real package; OpenCode's requests are sent as it sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import pytest
from helpers.kept import Kept, tell
from integration.stand import Stand, Talk, standing, user
from prometheus_client.parser import text_string_to_metric_families

from e2e.test_harnesses import installed

pytestmark = [pytest.mark.harness, pytest.mark.filterwarnings("ignore")]

KEY = "unused"
REFUSED = ("history_mismatch", "rollback_too_deep")
ANSWERED = ("committed", "replayed", "joined")
CITIES = ("Oslo", "Bergen", "Tromsø")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A server and an engine of the module's own, whose counts are those of one case at a time."""
    with standing(tmp_path_factory.mktemp("lost"), "--seed", "5", "--reasoning", "0") as made:
        yield made


def unrelated(base_url: str, talk: Talk) -> None:
    openai = installed("openai")
    with openai.OpenAI(base_url=base_url, api_key=KEY) as client:
        for number in range(5):
            with contextlib.suppress(openai.BadRequestError):
                client.chat.completions.create(model="simulator", messages=[user(f"Task {number}")])


def opencode(base_url: str, talk: Talk) -> None:
    """As opencode-ai 1.18.33 sends it: the title is asked for first, in the session that its header names."""
    openai = installed("openai")
    task = user('"Mend the bug"')
    title = [{"role": "system", "content": "You are a title generator."}, user("Generate a title for this:\n"), task]
    named = {"x-session-id": talk.id}
    with openai.OpenAI(base_url=base_url.replace(talk.path, ""), api_key=KEY, default_headers=named) as client:

        def say(messages: list[Any]) -> list[Any]:
            reply = client.chat.completions.create(model="simulator", messages=messages)
            return [*messages, reply.choices[0].message]

        say(title)
        messages = say([{"role": "system", "content": "You are opencode."}, task])
        for text in ("Go on", "And test it"):
            messages = say([*messages, user(text)])


def crewai(base_url: str, talk: Talk) -> None:
    """A crew of three tasks: each is a conversation of its own."""
    package = installed("crewai")
    llm = package.LLM(model="openai/simulator", base_url=base_url, api_key=KEY)
    agents = [package.Agent(role=f"Guide of {city}", goal="Answer", backstory="Local", llm=llm) for city in CITIES]
    tasks = [
        package.Task(description=f"What is the weather in {city}?", expected_output="A sentence", agent=agent)
        for city, agent in zip(CITIES, agents, strict=True)
    ]
    package.Crew(agents=agents, tasks=tasks).kickoff()


def dspy(base_url: str, talk: Talk) -> None:
    """One program, three inputs: the same system message and another user's each time."""
    package = installed("dspy")
    text = {"sim": {"text": "[[ ## answer ## ]]\nRain\n\n[[ ## completed ## ]]"}}
    lm = package.LM("openai/simulator", api_base=base_url, api_key=KEY, cache=False, extra_body=text, num_retries=0)
    with package.context(lm=lm):
        program = package.Predict("question -> answer")
        for city in CITIES:
            program(question=f"What is the weather in {city}?")


def as_tool(base_url: str, talk: Talk) -> None:
    """An agent that is another one's tool has a conversation of its own."""
    agents, openai = installed("agents"), installed("openai")
    agents.set_tracing_disabled(True)

    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY) as client:
            model = agents.OpenAIChatCompletionsModel(model="simulator", openai_client=client)
            inner = agents.Agent(name="translator", instructions="Translate.", model=model)
            tool = inner.as_tool(tool_name="translate", tool_description="Translates")
            outer = agents.Agent(name="editor", instructions="Be brief.", model=model, tools=[tool])
            await agents.Runner.run(outer, "Say it in Norwegian", max_turns=20)

    asyncio.run(work())


class Question(TypedDict):
    question: str
    answer: str


def langgraph(base_url: str, talk: Talk) -> None:
    """A graph whose middle node is a graph with a state, and so a conversation, of its own."""
    graphs, core = installed("langgraph.graph"), installed("langchain_core.messages")
    model = installed("langchain_openai").ChatOpenAI(base_url=base_url, api_key=KEY, model="simulator")

    def ask(state: Question) -> Mapping[str, str]:
        asked = [core.SystemMessage("You look things up."), core.HumanMessage(state["question"])]
        return {"answer": model.invoke(asked).content}

    def answer(state: Any) -> Mapping[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    inner = graphs.StateGraph(Question)
    inner.add_node("ask", ask)
    inner.add_edge(graphs.START, "ask")
    researcher = inner.compile()

    def research(state: Any) -> Mapping[str, Any]:
        found = researcher.invoke({"question": state["messages"][-1].content, "answer": ""})
        return {"messages": [core.HumanMessage(f"It was found: {found['answer']}")]}

    outer = graphs.StateGraph(graphs.MessagesState)
    outer.add_sequence([("plan", answer), ("research", research), ("answer", answer)])
    outer.add_edge(graphs.START, "plan")
    outer.compile().invoke({"messages": [core.HumanMessage("What is the weather?")]})


CASES = {
    "five unrelated messages": unrelated,
    "CrewAI, three tasks": crewai,
    "dspy, three inputs": dspy,
    "openai-agents, as_tool": as_tool,
    "LangGraph, a sub-graph": langgraph,
    "OpenCode, its title": opencode,
}


@pytest.mark.parametrize("setting", ["reject", "segment"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_that_was_sampled_is_lost(
    request: pytest.FixtureRequest,
    server: Stand,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    setting: str,
) -> None:
    for name in ("OTEL_SDK_DISABLED", "CREWAI_DISABLE_TELEMETRY", "LITELLM_LOCAL_MODEL_COST_MAP"):
        monkeypatch.setenv(name, "true")
    server.sim.post("/sim/reset")
    before = outcomes(server)
    talk = server.talk() if setting == "reject" else server.talk(on_divergence=setting)
    failure: Exception | None = None
    try:
        CASES[case](f"{server.server.base_url}{talk.path}/v1", talk)
    except Exception as error:  # noqa: BLE001
        failure = error  # a harness stops where it is refused, with an error of its own
    kept = audit(server, talk, before, case, setting)
    if failure is not None and not kept.replies_400:
        raise failure
    tell(request, kept)
    assert kept.engine_tokens == kept.loss_tokens > 0, "each sampled token is in one row's loss"
    assert kept.committed == kept.live == kept.replies_200, "what was acknowledged is there"
    assert "RolledBack" not in talk.types()
    if setting == "reject":
        assert (kept.replies_400 > 0, kept.rows) == (True, 1)
    else:
        assert (kept.replies_400, kept.rows > 1) == (0, True)


def audit(server: Stand, talk: Talk, before: Mapping[str, float], case: str, setting: str) -> Kept:
    """What the engine, the server's counters, the log and the export each say of the session."""
    ended = {outcome: int(count - before[outcome]) for outcome, count in outcomes(server).items()}
    rows = talk.rows()
    kept = Kept(
        case=case,
        setting=setting,
        replies_200=sum(ended[outcome] for outcome in ANSWERED),
        replies_400=sum(ended[outcome] for outcome in REFUSED),
        committed=len(talk.committed()),
        live=len(talk.state()["records"]),
        rows=len(rows),
        engine_tokens=server.stats()["sampled_tokens"],
        loss_tokens=sum(sum(row["loss_mask"]) for row in rows),
    )
    assert sum(ended.values()) == kept.replies_200 + kept.replies_400, ended
    return kept


def outcomes(server: Stand) -> dict[str, float]:
    """How the server's turns ended since it began."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == "turnlog_turns_total"]
    return {sample.labels["outcome"]: sample.value for sample in samples}
