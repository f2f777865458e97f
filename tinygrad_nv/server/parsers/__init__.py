"""Parsers of answers: reasoning and tool calls in a text that grows.

Read in this order:
  parser.py        the protocol of a parser: text in, events out
  json_calls.py    tool calls that are written as JSON objects (Hermes, Llama, tool choices)
  think.py         reasoning between two markers: <think> … </think>
  mistral.py       [TOOL_CALLS] and a list, or names with arguments
  qwen.py          <tool_call><function=…><parameter=…>…</parameter></function></tool_call>
  pythonic.py      the whole answer is [f(a=1), g(b="x")]
  harmony.py       channels of gpt-oss
  literals.py      values as Python or JSON writes them
  schema_values.py values that a tool's schema gives a type
  table.py         all of them by name; which one a chat template asks for

A new parser is a file here, and a line of table.py.
"""
