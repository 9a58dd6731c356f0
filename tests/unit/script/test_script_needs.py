"""Which waits for the device belong to the method, and which only to a log."""

from __future__ import annotations

import ast

import pytest

from hasten.script.needs import needed

NEEDED = {
    "action of an agent": """
for step in range(9):
    action = policy(state).argmax().item()
    observation, reward = env.step(action)
    state = torch.tensor(observation).to(device)
""",
    "action that a function returns": """
def act(state):
    return int(policy(state).argmax().item())

while True:
    observation = env.step(act(state))
    state = torch.from_numpy(observation)
""",
    "action by way of a buffer": """
def learn(memory):
    batch = torch.stack(memory.sample())

for step in range(9):
    choice = policy(state).argmax().item()
    state = world(choice)
    memory.push(choice)
    learn(memory)
""",
    "lengths for packing": """
for x, n in loader:
    y = rnn.pack_padded_sequence(x, n.cpu().item())
""",
    "a value for a function's parameter": """
def roll(choice):
    return torch.tensor(world(choice))

for step in range(9):
    choice = policy(state).argmax().item()
    state = roll(choice)
""",
}
NOT_NEEDED = {
    "a log": """
for x in loader:
    loss = step(x.to(device))
    log.append(loss.item())
plot(torch.tensor(log))
""",
    "a meter": """
for x in bar:
    x = x.to(device)
    meter.update(loss.item())
    bar.set_postfix(loss=meter.value)
""",
    "a metric of NumPy": """
for x, y in loader:
    x, y = x.to(device), y.to(device)
    y = y.cpu().numpy().item()
    total += accuracy(y)
""",
    "a name that another function has too": """
def metric(out):
    x = out.argmax().item()
    return None

for x in loader:
    metric(model(x.to(device)))
""",
    "a condition": """
for x in loader:
    x = x.to(device)
    if loss.item() < best:
        best = 0
""",
    "a running total": """
for x in loader:
    total += loss.item()
    x.to(total)
""",
}


def line_of(source: str) -> int:
    return next(n for n, text in enumerate(source.splitlines(), 1) if ".item()" in text)


@pytest.mark.parametrize("name", NEEDED)
def test_what_comes_back_or_belongs_on_the_host_is_needed(name: str) -> None:
    source = NEEDED[name]
    assert needed(ast.parse(source), line_of(source))


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_what_is_only_looked_at_is_not(name: str) -> None:
    source = NOT_NEEDED[name]
    assert not needed(ast.parse(source), line_of(source))


def test_a_line_without_a_statement_needs_nothing() -> None:
    assert not needed(ast.parse(""), 1)
