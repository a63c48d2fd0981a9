"""A shop's agent with tools of JSON, and short chats about a problem of mathematics."""

from __future__ import annotations

import json
from typing import Any

from ops.demo.stories.script import Call, Session, Turn, chance, tool

RETAIL_GROUP, MATH_GROUP = "retail/exchange-073", "math/square-divisors"

SHOP_TOOLS = (
    tool("find_user", "The user with this e-mail address.", email="Address."),
    tool("get_order", "An order with its items.", order_id="Its id."),
    tool("list_variants", "The variants of a product that are in stock.", product_id="Its id."),
    tool("exchange_item", "Exchange an item.", order_id="Order.", item_id="Old.", new_item_id="New."),
    tool("refund", "Refund an amount in EUR.", order_id="Order.", amount="Amount.", reason="Reason."),
    tool("escalate", "Hand over to a person.", reason="Reason."),
)
SHOP_SYSTEM = """You are the customer agent of a shop. **Policy**

1. Know who you speak with before you tell anything of an order.
2. Delivered items can be exchanged within 30 days, for another variant of the same product.
3. Ask for an explicit *yes* before anything is changed."""
OPENING = (
    "Hi, my lamp arrived in black but I wanted the brass one. Can I swap it?",
    "hello?? the desk lamp i got is the wrong colour. order 4471",
    "I'd like to exchange the lamp of my last order for the brass version please.",
)
USER = {"user_id": "mira_4471", "name": "Mira Okafor", "orders": ["4471", "4102"], "member_since": "2021-05-03"}
ORDER = {
    "order_id": "4471",
    "status": "delivered",
    "delivered_at": "2026-02-27",
    "items": [
        {
            "item_id": "LMP-BLK",
            "product_id": "P-88",
            "name": "Desk lamp",
            "options": {"finish": "black"},
            "price": 49.9,
        },
        {"item_id": "BLB-09", "product_id": "P-12", "name": "Bulb E27", "options": {"kelvin": 2700}, "price": 6.5},
    ],
    "payment": {"method": "card", "last4": "0042"},
}
VARIANTS = {
    "product_id": "P-88",
    "variants": [
        {"item_id": "LMP-BRS", "options": {"finish": "brass"}, "price": 54.9, "stock": 4},
        {"item_id": "LMP-WHT", "options": {"finish": "white"}, "price": 49.9, "stock": 0},
    ],
}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _known(name: str, result: Any, seconds: float = 0.3, **arguments: Any) -> Call:
    return Call(name, arguments, _json(result), seconds)


def retail(count: int = 12) -> list[Session]:
    sessions = []
    for attempt in range(count):
        rng = chance(RETAIL_GROUP, attempt)
        asks_first, succeeds = attempt % 4 != 2, attempt % 4 != 3
        exchange = {"order_id": "4471", "item_id": "LMP-BLK", "new_item_id": "LMP-BRS"}
        turns = [
            Turn("I am happy to help. What is the e-mail address of your account?", ask=rng.choice(OPENING)),
            Turn(ask="mira.okafor@example.com", calls=[_known("find_user", USER, email="mira.okafor@example.com")]),
            Turn(
                calls=[
                    _known("get_order", ORDER, 0.5, order_id="4471"),
                    _known("list_variants", VARIANTS, 0.7, product_id="P-88"),
                ]
            ),
        ]
        if attempt == 5:
            turns.append(Turn(fault="status_429"))
        if asks_first:
            turns.append(
                Turn(
                    "I found order **4471**, delivered on 27 February.\n\n"
                    "- *Desk lamp, black* (49.90 €) → *Desk lamp, brass* (54.90 €)\n"
                    "- Difference: **5.00 €**, to the card that ends with 0042\n\nShall I go on? (yes/no)",
                    "Delivered, and within 30 days. The brass one is in stock and 5 EUR more. I need a yes first.",
                )
            )
        else:
            turns.append(
                Turn(
                    "I'll exchange it right away.",
                    calls=[_known("exchange_item", {"ok": True, "due": 5.0}, 0.9, **exchange)],
                )
            )
        if succeeds and asks_first:
            done = {"ok": True, "exchange_id": f"X-{9000 + attempt}", "due": 5.0}
            turns.append(Turn(ask="yes", calls=[_known("exchange_item", done, 0.9, **exchange)]))
        if not succeeds:
            error = {"error": "item_not_in_order", "item_id": "LMP-BLACK"}
            turns.append(
                Turn(ask="yes", calls=[_known("exchange_item", error, 0.4, **{**exchange, "item_id": "LMP-BLACK"})])
            )
            turns.append(
                Turn(calls=[_known("escalate", {"ticket": 311 + attempt}, 0.3, reason="The exchange failed.")])
            )
        turns.append(
            Turn(
                "Done: the brass lamp is on its way, and a label for the old one is in your mail."
                if succeeds
                else "I am sorry, I have handed this over to a colleague."
            )
        )
        if attempt in (4, 9):
            turns.append(Turn("You are welcome! Is there anything else?", ask="Great, thanks a lot 🙏"))
        reward = 1.0 if succeeds and asks_first else 0.3 if succeeds else 0.0
        sessions.append(
            Session(
                {
                    "session_id": f"retail-exchange-{attempt:02}",
                    "group_id": RETAIL_GROUP,
                    "attempt": attempt,
                    "metadata": {"task": "exchange-073", "harness": "shop-sim", "user": "mira", "split": "train"},
                },
                SHOP_SYSTEM,
                turns,
                SHOP_TOOLS,
                reward=None if attempt in (10, 11) else reward,
                components={
                    "database": float(succeeds),
                    "policy": float(asks_first),
                    "tone": round(rng.uniform(0.6, 1), 2),
                },
                closes=attempt < 10,
                notes={"note": "Exchanged without a yes: against the policy.", "tags": ["policy"]}
                if attempt == 2
                else {},
            )
        )
    return sessions


PROBLEM = r"How many positive divisors of $n = 2^5 \cdot 3^3 \cdot 5^2$ are perfect squares? End with `Answer: …`."
THINK = (
    "A divisor is 2^a 3^b 5^c with a ≤ 5, b ≤ 3, c ≤ 2. It is a square if every exponent is even: a in {0, 2, 4}, b in "
    "{0, 2}, c in {0, 2}. ",
    "Let me check with a smaller case: 2^2 has the divisors 1, 2, 4, and 1 and 4 are squares, that is two. Good. ",
    "Wait, does b reach 3? It is odd, so the largest even one is 2. ",
)
RIGHT = r"""Write a divisor as $2^a 3^b 5^c$. It is a square exactly if $a$, $b$ and $c$ are **even**.

| prime | choices | number |
| --- | --- | --- |
| 2 | 0, 2, 4 | 3 |
| 3 | 0, 2 | 2 |
| 5 | 0, 2 | 2 |

So there are $3 \cdot 2 \cdot 2 = 12$.

```python
n = 2**5 * 3**3 * 5**2
sum(n % (k * k) == 0 for k in range(1, n) if k * k <= n)  # 12
```

Answer: 12"""
WRONG = (
    "There are $6 \\cdot 4 \\cdot 3 = 72$ divisors.\n\nAnswer: 72",
    "The exponents 0, 2, 4 and 0, 2 and 0, 1, 2 give $3 \\cdot 2 \\cdot 3$.\n\nAnswer: 18",
)


def maths(count: int = 16) -> list[Session]:
    sessions = []
    for attempt in range(count):
        rng = chance(MATH_GROUP, attempt)
        is_right = rng.random() < 0.6
        think = "".join(rng.choices(THINK, k=rng.randint(1, 6)))
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 5} if attempt < 8 else {}
        sim: dict[str, Any] = {"weight_versions": ["41", "42"]} if attempt == 6 else {}
        is_cut = attempt in (7, 12)
        if is_cut:
            think, fields = "".join(THINK) * 9, {**fields, "max_tokens": 300}
        turns = [Turn(RIGHT if is_right else WRONG[attempt % 2], think, ask=PROBLEM, fields=fields, sim=sim)]
        if attempt % 5 == 0:
            turns.append(
                Turn(
                    "Yes: the three choices are independent, so they multiply.\n\nAnswer: 12",
                    THINK[1],
                    ask="Are you sure?",
                    fields=fields,
                )
            )
        sessions.append(
            Session(
                {
                    "session_id": f"math-squares-{attempt:02}",
                    "group_id": MATH_GROUP,
                    "attempt": attempt,
                    "metadata": {"task": "square-divisors", "level": 3, "split": "train"},
                },
                "Think step by step.",
                turns,
                reward=float((is_right or attempt % 5 == 0) and not is_cut),
                components={"correct": float(is_right and not is_cut), "format": 1.0 - is_cut},
                columns=("advantages",),
            )
        )
    return sessions
