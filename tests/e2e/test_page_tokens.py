"""A session's tokens and its tree in a real Chromium: folded prompts, colours, the least likely tokens, the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from integration.stand import Stand, Talk, until, user
from playwright.sync_api import expect

from e2e.page import PageStand, Watched, barriers

pytestmark = pytest.mark.long

NOW = {"latency_s": 0}
Watch = Callable[..., Watched]


@pytest.fixture(scope="module")
def stand(quick_stand: Stand) -> Stand:
    return quick_stand


@pytest.fixture(scope="module")
def tree(stand: Stand) -> Talk:
    """A retry of another agent's, a chain of 12 turns, and a summary of a discarded plan."""
    talk = stand.talk(history="tree")
    talk.say("Which reefs recovered?", sim=NOW)
    first = list(talk.messages)
    talk.say("Search the surveys.", sim={**NOW, "text": "Here it is"})
    quoted = talk.messages[-1]
    for number in range(12):
        talk.say(f"Step {number}", sim={**NOW, "completion_tokens": 3})
    talk.messages = list(first)
    talk.say("Ask the archive.", sim={**NOW, "text": "Here is none"}, headers={"x-turnlog-agent-id": "scout"})
    assert talk.chat([user("So far"), quoted, user("Write it")], sim=NOW).status_code == 200
    return talk


def test_tokens_are_folded_coloured_and_jumped_to(stand: Stand, watch: Watch) -> None:
    talk = stand.talk()
    sim = {**NOW, "completion_tokens": 1200, "weight_versions": ["7", "8"]}
    talk.say("a long question " * 50, sim=sim, top_logprobs=3)
    talk.say("more", sim={**NOW, "completion_tokens": 1500, "finish_reason": "length"})
    count = talk.committed()[1]["output_tokens"]
    talk.column(2, "advantage", [number / count for number in range(count)])
    kept = list(talk.messages)
    talk.say("not this", sim={**NOW, "completion_tokens": 20})
    talk.messages = kept
    talk.say("but this", sim={**NOW, "completion_tokens": 30})
    [row] = talk.rows()
    sampled = [at for at, there in enumerate(row["sampled_mask"]) if there]
    least = sorted(sampled, key=lambda at: row["logprobs"][at])[:30]

    page = watch(stand.server.base_url).open(f"#/session/{talk.id}?tab=tokens")
    cells = page.locator(".tokens .tok")
    expect(cells).to_have_count(2000)
    expect(cells.first, "it opens at the first sampled token").to_have_attribute("data-at", str(sampled[0]))
    assert page.evaluate("document.querySelectorAll('*').length") < 4000
    expect(page.locator(".tokenhead").first).to_contain_text("set TURNLOG_TOKENIZER to read them")
    legend = page.locator(".tokens-tab .legend")
    expect(legend).to_contain_text("perplexity")
    expect(legend).to_contain_text("turns were rolled back")
    counts = legend.locator("strong").all_text_contents()
    assert sum(int(count.replace(",", "")) for count in counts) == len(sampled)

    page.keyboard.press("u")
    focused = "document.querySelector('.tok:focus')?.dataset.at"
    until(lambda: page.evaluate(focused) is not None)
    assert page.evaluate(focused) == str(min(least))
    page.keyboard.press("U")
    until(lambda: page.evaluate(focused) == str(max(least)))
    assert f"at={max(least)}" in page.evaluate("location.hash")
    detail = page.locator(".tokendetail")
    expect(detail).to_contain_text(f"position {max(least):,} · id {row['tokens'][max(least)]}")
    expect(detail).to_contain_text(f"logprob {row['logprobs'][max(least)]:.6f}")
    page.locator(f".least [data-at='{least[0]}']").click()
    until(lambda: page.evaluate(focused) == str(least[0]))
    expect(page.locator(".least [aria-current]")).to_have_attribute("data-at", str(least[0]))

    page.get_by_label("place in the row").fill(str(sampled[-5]))
    until(lambda: page.evaluate(focused) == str(sampled[-5]))
    for note in ("turns 3 were rolled back here", "ends by length"):
        expect(page.locator(".turnrun", has_text=note)).not_to_have_count(0)
    page.get_by_label("colour", exact=True).select_option("column advantage")
    expect(page.locator(f".tok[data-at='{row['turns'][1]['end'] - 1}']")).to_contain_class("lp6")
    assert "0" not in legend.locator("strong").all_text_contents()
    page.get_by_label("colour", exact=True).select_option("entropy")
    page.get_by_role("button", name="earlier tokens").click()
    page.locator(f".tok[data-at='{sampled[0]}']").wait_for()
    prompt = page.get_by_role("button", name=f"prompt, {sampled[0]:,} tokens")
    prompt.click()
    expect(page.locator(".promptrun .tok")).to_have_count(sampled[0])
    page.locator(".promptrun .tok").last.focus()
    page.locator(".tokendetail", has_text="not sampled, not in the loss").wait_for()
    page.keyboard.press("ArrowRight")
    expect(detail).to_contain_text("weights 7")
    expect(detail).to_contain_text("entropy")
    prompt.click()
    expect(page.locator(".promptrun")).to_have_count(0)


def test_a_branch_is_chosen_and_a_turn_gone_to(stand: Stand, tree: Talk, watch: Watch) -> None:
    page = watch(stand.server.base_url).open(f"#/session/{tree.id}?tab=tokens&branch=0")
    page.locator(".tokens .turnrun").nth(13).wait_for()
    page.get_by_label("branch", exact=True).select_option("1")
    page.get_by_text("Branch 1 began because another agent asked.").wait_for()
    assert "branch=1" in page.evaluate("location.hash")
    page.locator(".turnrun .mark", has_text="turn 15").click()
    until(lambda: "turn=15" in page.evaluate("location.hash"))
    expect(page.locator(".turnrun")).to_have_count(2)


def test_the_tree_is_a_graph(stand: Stand, tree: Talk, watch: Watch) -> None:
    page = watch(stand.server.base_url).open(f"#/session/{tree.id}?tab=tree&turn=15")
    graph = page.get_by_role("group", name="Tree: 3 branches, 16 turns")
    names = graph.locator("text:has(.branchnumber)")
    expect(names).to_have_text(
        ["0 start Which reefs recovered?", "1 agent scout: Ask the archive.", "2 compaction So far"]
    )
    told = page.locator(".tree-tab > p")
    expect(told).to_contain_text("branch 1, agent after turn 1 of branch 0, because another agent asked, agent scout")
    expect(told).to_contain_text("its row trains turns 15")
    expect(graph.locator("path.carries")).to_have_count(1)
    expect(graph.get_by_role("button", name="turn 16, in the loss of branch 2, quotes turn 2")).to_have_count(1)

    chain = graph.get_by_role("button", name="turns 3 to 13, in the loss of branch 0: show")
    chain.focus()
    page.keyboard.press("Enter")
    graph.get_by_role("button", name="turn 9, ").wait_for()
    graph.get_by_role("button", name="turn 15, ").focus()
    for key, at in (("ArrowUp", "turn 2"), ("ArrowRight", "turn 3"), ("ArrowLeft", "turn 2"), ("ArrowDown", "turn 15")):
        page.keyboard.press(key)
        expect(graph.locator(f"[data-key='{at}']"), key).to_be_focused()
    page.keyboard.press("ArrowUp")
    page.keyboard.press(" ")
    until(lambda: "turn=2" in page.evaluate("location.hash"))
    graph.get_by_role("button", name="branch 2, compaction").click()
    until(lambda: "branch=2" in page.evaluate("location.hash"))
    page.get_by_text("As text").click()
    texts = page.locator(".tree-tab details li")
    expect(texts).to_have_count(3)
    expect(texts.nth(2)).to_contain_text(
        "branch 2, compaction, because its first request quotes a reply of another branch (turn 2)"
    )
    page.get_by_role("button", name="larger").click()
    page.locator(".tree-tab > p").get_by_role("link", name="compare with branch").or_(graph).first.wait_for()


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((one) => one / 255)
      .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [0, 1, 2, 3, 4, 5, 6].map((place) => {
    const cell = document.createElement("span");
    cell.className = `tok lp${place}`;
    document.querySelector(".tokens").append(cell);
    const [one, other] = [getComputedStyle(cell).color, getComputedStyle(cell).backgroundColor].map(light).sort();
    cell.remove();
    return (other + 0.05) / (one + 0.05);
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_barrier_and_text_on_every_colour_can_be_read(page_stand: PageStand, watch: Watch, scheme: str) -> None:
    filled = page_stand.filled
    watched = watch(page_stand.stand.server.base_url, scheme=scheme)
    page = watched.open(f"#/session/{filled.rolled_back}?tab=tokens")
    page.locator(".tokens .tok").first.wait_for()
    ratios = page.evaluate(CONTRAST)
    assert len(set(ratios)) == 7
    assert min(ratios) >= 4.5, ratios
    found = barriers(page, scheme)
    page.locator(".tokens .fold").first.click()
    page.locator(".promptrun .tok").first.wait_for()
    found += barriers(page, scheme)
    watched.go(f"#/session/{filled.tree}?tab=tree&branch=1")
    page.locator(".tree .spot").first.wait_for()
    found += barriers(page, scheme)
    assert not found, "\n".join(found)
