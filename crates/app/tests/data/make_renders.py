#!/usr/bin/env python3
"""Renders of qwen_like.jinja by Jinja2, set up as transformers sets it up (needs jinja2 3.1).

    python make_renders.py > renders.json
"""
import json, os, re
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = os.path.dirname(os.path.abspath(__file__))


def raise_exception(message):
    raise ValueError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception
env.globals["strftime_now"] = lambda format: __import__("datetime").datetime(2026, 11, 5, 14, 3, 9).strftime(format)
source = open(f"{HERE}/qwen_like.jinja", encoding="utf-8").read()
# transformers parses generation blocks with an extension of its own; as plain blocks they print the same.
source = re.sub(r"{%([-+]?) generation ([-+]?)%}", r"{%\1 if true \2%}", source)
source = re.sub(r"{%([-+]?) endgeneration ([-+]?)%}", r"{%\1 endif \2%}", source)
template = env.from_string(source)

user = lambda text: dict(role="user", content=text)
system = lambda text: dict(role="system", content=text)
weather = dict(type="function", function=dict(name="weather", description="Says <b>what</b> it's like — °C & more", parameters=dict(type="object", properties=dict(city=dict(type="string"), days=dict(type="integer", default=1)))))
call = lambda name, arguments: dict(id="c1", type="function", function=dict(name=name, arguments=arguments))
agent = [
    user("What's it like in Zürich?"),
    dict(role="assistant", content="Let me see.", reasoning_content="\nI need a tool.\n", tool_calls=[call("weather", {"city": "Zürich", "days": 2, "deep": {"a": [1, 2.5, None, True]}}), call("weather", {})]),
    dict(role="tool", content="  4 °C\n", tool_call_id="c1"),
    dict(role="tool", content="{\"t\": 5}", tool_call_id="c2"),
    dict(role="assistant", content="", reasoning_content="Cold.", tool_calls=[call("coat", {"warm": True, "text": "line 1\nline 2"})]),
    dict(role="tool", content="ok"),
]
cases = {
    "one question": dict(messages=[user("  hello \n")]),
    "no effort": dict(messages=[user("hello")], reasoning_effort="medium"),
    "system": dict(messages=[system(" Be brief.\n"), user("hello")], reasoning_effort="low"),
    "thinking off": dict(messages=[user("hello")], enable_thinking=False),
    "thinking on": dict(messages=[user("hello")], enable_thinking=True),
    "tools": dict(messages=[system("Be brief."), user("hello")], tools=[weather, weather]),
    "agent": dict(messages=agent, tools=[weather]),
    "agent, later question": dict(messages=agent + [dict(role="assistant", content="Take a coat.", reasoning_content="So."), user("Thanks!")], tools=[weather]),
    "preserved": dict(messages=agent + [dict(role="assistant", content="Take a coat."), user("Thanks!")], tools=[weather], preserve_thinking=True),
    "reasoning in content": dict(messages=[user("1+1?"), dict(role="assistant", content="<think>\nEasy.\n</think>\n\n2"), user("2+2?")], preserve_thinking=True),
    "unknown effort": dict(messages=[user("hello")], reasoning_effort="high"),
    "late system": dict(messages=[user("hello"), system("Be brief.")]),
    "no question": dict(messages=[system("Be brief.")]),
}
out = []
for name, given in cases.items():
    entry = dict(name=name, **given)
    try:
        entry["expected"] = template.render(**{"tools": None, "documents": None, "add_generation_prompt": True, **given})
    except ValueError as error:
        entry["refused"] = str(error)
    out.append(entry)
print(json.dumps(out, ensure_ascii=False, indent=1))
