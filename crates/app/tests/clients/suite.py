"""A suite for the official Python clients. Prints a transcript; whatever is wrong raises.

Usage: suite.py URL KEY MODEL
"""

import json
import sys
import time
import urllib.request

import anthropic
import openai

URL, KEY, MODEL = sys.argv[1:4]
ai = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
claude = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tell(what, value):
    print(f"{what}: {json.dumps(value, ensure_ascii=False)}")


def status():
    request = urllib.request.Request(f"{URL}/status", headers={"authorization": f"Bearer {KEY}"})
    return json.load(urllib.request.urlopen(request))


def refused(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind} was not raised")


def openai_chat():
    assert [m.id for m in ai.models.list()] == [MODEL]
    assert ai.models.retrieve(MODEL).id == MODEL
    whole = ai.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_completion_tokens=12)
    text = whole.choices[0].message.content
    tell("chat", [text, whole.choices[0].finish_reason, whole.usage.completion_tokens])
    stream = ai.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens and not chunks[-1].choices
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    two = ai.chat.completions.create(model=MODEL, messages=ASK, n=2, seed=7, temperature=1.2, max_tokens=8)
    assert len({c.message.content for c in two.choices}) == 2
    tell("two choices", [c.message.content for c in two.choices])
    logprobs = ai.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    tokens = logprobs.choices[0].logprobs.content
    assert all(t.logprob == t.top_logprobs[0].logprob and t.token == t.top_logprobs[0].token for t in tokens)
    tell("logprobs", [t.token for t in tokens])
    stopped = ai.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=40, stop=[" France"])
    tell("stop", [stopped.choices[0].message.content, stopped.choices[0].finish_reason])


def openai_tools():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
    messages = list(ASK)
    first = ai.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False,
        temperature=0, max_tokens=100,
    )
    message = first.choices[0].message
    call = message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert first.choices[0].finish_reason == "tool_calls" and arguments["city"] in ("Paris", "Rome")
    tell("call", [call.function.name, sorted(arguments)])
    messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = ai.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, tool_choice="none", temperature=0, max_tokens=12
    )
    assert second.choices[0].message.tool_calls is None
    tell("after the call", second.choices[0].finish_reason)
    name, parts, ids = "", "", set()
    for chunk in ai.chat.completions.create(
        model=MODEL, messages=ASK, tools=tools, temperature=0, max_tokens=100, stream=True, parallel_tool_calls=False,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    ):
        for delta in chunk.choices[0].delta.tool_calls or []:
            name += delta.function.name or ""
            parts += delta.function.arguments or ""
            ids |= {delta.id} - {None}
    assert json.loads(parts) == arguments and name == "weather" and len(ids) == 1


def openai_structured():
    schema = {"name": "trip", "schema": SCHEMA, "strict": True}
    reply = ai.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_tokens=60,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    value = json.loads(reply.choices[0].message.content)
    assert value["city"] in ("Paris", "Rome") and 1 <= value["days"] <= 9
    tell("structured", sorted(value))
    error = refused(openai.BadRequestError, lambda: ai.chat.completions.create(
        model=MODEL, messages=ASK,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "string", "pattern": "("}}},
    ))
    tell("bad schema", error.code)


def openai_errors():
    error = refused(openai.NotFoundError, lambda: ai.chat.completions.create(model="no-such", messages=ASK))
    tell("unknown model", error.code)
    long = [{"role": "user", "content": "word " * 20000}]
    error = refused(openai.BadRequestError, lambda: ai.chat.completions.create(model=MODEL, messages=long))
    assert error.code == "context_length_exceeded"
    wrong = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    error = refused(openai.AuthenticationError, lambda: wrong.models.list())
    tell("wrong key", error.code)


def openai_other():
    text = ai.completions.create(model=MODEL, prompt="Once upon a", temperature=0, max_tokens=6).choices[0].text
    tell("completion", text)
    first = ai.responses.create(model=MODEL, input="Say hello.", temperature=0, max_output_tokens=6)
    tell("response", [first.output_text, first.status])
    second = ai.responses.create(
        model=MODEL, input="Again.", previous_response_id=first.id, temperature=0, max_output_tokens=6
    )
    assert ai.responses.retrieve(second.id).output_text == second.output_text
    ai.responses.delete(second.id)
    refused(openai.NotFoundError, lambda: ai.responses.retrieve(second.id))
    whole = ai.responses.create(model=MODEL, input=ASK, temperature=0)
    with ai.responses.stream(model=MODEL, input=ASK, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == whole.output_text
    tell("response events", [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind])
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    called = ai.responses.create(
        model=MODEL, input="Weather?", tools=tools, tool_choice="required", parallel_tool_calls=False,
        temperature=0, max_output_tokens=100,
    )
    call = called.output[0]
    assert call.type == "function_call" and json.loads(call.arguments)["city"]
    after = ai.responses.create(
        model=MODEL, previous_response_id=called.id, tools=tools, tool_choice="none", temperature=0, max_output_tokens=6,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
    )
    tell("response after the call", after.status)


def cancellation():
    before = status()["requests"]["cancelled"]
    stream = ai.completions.create(model=MODEL, prompt="1 2 3", max_tokens=1500, logit_bias={"0": -100, "2": -100}, stream=True)
    next(iter(stream))
    stream.close()
    for _ in range(200):
        now = status()
        if now["requests"]["cancelled"] == before + 1 and now["lanes"]["running"] == 0:
            return
        time.sleep(0.05)
    raise AssertionError(now)


def anthropic_messages():
    whole = claude.messages.create(model=MODEL, messages=ASK, max_tokens=12, extra_body=GREEDY)
    tell("message", [whole.content[0].text, whole.stop_reason])
    with claude.messages.stream(model=MODEL, messages=ASK, max_tokens=12, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = claude.messages.count_tokens(model=MODEL, messages=ASK)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with claude.messages.stream(model=MODEL, messages=ASK, max_tokens=40, extra_body=GREEDY, thinking=thinking) as stream:
        kinds = [event.type for event in stream]
        thought = stream.get_final_message()
    assert thought.content[0].type == "thinking" and thought.content[0].signature
    assert "signature" in kinds
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    with claude.messages.stream(model=MODEL, messages=ASK, max_tokens=100, extra_body=GREEDY, tools=tools, tool_choice=choice) as stream:
        called = stream.get_final_message()
    call = called.content[-1]
    assert called.stop_reason == "tool_use" and call.type == "tool_use" and call.input["city"] in ("Paris", "Rome")
    messages = ASK + [
        {"role": "assistant", "content": [block.model_dump() for block in called.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    after = claude.messages.create(
        model=MODEL, messages=messages, max_tokens=12, extra_body=GREEDY, tools=tools, tool_choice={"type": "none"}
    )
    tell("message after the call", after.stop_reason)
    error = refused(anthropic.BadRequestError, lambda: claude.messages.create(
        model=MODEL, messages=[{"role": "user", "content": "word " * 20000}], max_tokens=5
    ))
    assert "prompt is too long" in str(error), error
    error = refused(anthropic.NotFoundError, lambda: claude.messages.create(model="no-such", messages=ASK, max_tokens=5))
    tell("unknown model", error.body["error"]["type"])
    wrong = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    refused(anthropic.AuthenticationError, lambda: wrong.messages.count_tokens(model=MODEL, messages=ASK))


for case in [openai_chat, openai_tools, openai_structured, openai_errors, openai_other, cancellation, anthropic_messages]:
    print(f"# {case.__name__}")
    case()
