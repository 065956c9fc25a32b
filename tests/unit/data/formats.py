"""Chat templates of seven model families, modelled on the published ones, and a small tokenizer with each family's
special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from roll.data.renderers.base import ChatRenderer
from roll.data.renderers.families import chat_renderer

TEXTS = Path(__file__).parents[3] / "docs"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenisation pattern of Qwen's tokenizers. The patterns of Llama 3 and GLM split digits differently."""
HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HERMES_TOOLS = """\
"# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function signatures within \
<tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n\""""
HERMES_RESPONSE = """\
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}"""
HERMES_CALL = """\
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}"""
QWEN2_5 = f"""\
{{%- set system = messages[0].content if messages[0].role == 'system' else 'You are Qwen, created by Alibaba Cloud. \
You are a helpful assistant.' %}}
{{{{- '<|im_start|>system\\n' + system }}}}
{{%- if tools %}}{{{{- "\\n\\n" + {HERMES_TOOLS} }}}}{{%- else %}}{{{{- '<|im_end|>\\n' }}}}{{%- endif %}}
{{%- for message in messages %}}
    {{%- if message.role == 'tool' %}}{HERMES_RESPONSE}
    {{%- elif message.role == 'assistant' and message.tool_calls %}}
        {{{{- '<|im_start|>assistant' + ('\\n' + message.content if message.content else '') }}}}
        {{%- for call in message.tool_calls %}}{{{{- '\\n' }}}}{HERMES_CALL}{{%- endfor %}}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- elif message.role != 'system' or not loop.first %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{{{- '<|im_start|>assistant\\n' if add_generation_prompt }}}}"""
QWEN3 = f"""\
{{%- if tools %}}
    {{{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}}}
    {{{{- {HERMES_TOOLS} }}}}
{{%- elif messages[0].role == 'system' %}}
    {{{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- set ns = namespace(last=messages | length - 1) %}}
{{%- for message in messages %}}{{%- if message.role == 'user' %}}{{%- set ns.last = loop.index0 %}}{{%- endif %}}{{%- endfor %}}
{{%- for message in messages %}}
    {{%- if message.role == 'tool' %}}{HERMES_RESPONSE}
    {{%- elif message.role == 'assistant' %}}
        {{%- set thought = message.reasoning_content or '' %}}
        {{{{- '<|im_start|>assistant\\n' }}}}
        {{%- if loop.index0 > ns.last and (loop.last or thought) %}}
            {{{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}}}
        {{%- else %}}{{{{- message.content }}}}{{%- endif %}}
        {{%- for call in message.tool_calls or [] %}}
            {{{{- '\\n' if message.content or not loop.first }}}}{HERMES_CALL}
        {{%- endfor %}}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- elif message.role != 'system' or not loop.first %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{{{- '<|im_start|>assistant\\n' if add_generation_prompt }}}}"""
LLAMA3 = """\
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\n' + ('Environment: ipython\\n' if tools else '') }}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' }}
{{- messages[0].content | trim if messages[0].role == 'system' }}{{- '<|eot_id|>' }}
{%- for message in rest %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and loop.first %}
            {{- 'Given the following functions, please respond with a JSON for a function call with its proper arguments that best ' }}
            {{- 'answers the given prompt.\\n\\nRespond in the format {"name": function name, "parameters": dictionary of argument name ' }}
            {{- 'and its value}.Do not use variables.\\n\\n' }}
            {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim }}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt }}"""
MISTRAL = """\
{{- '<s>' }}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('the roles must alternate') }}{%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + (messages[0].content + '\\n\\n' if loop.last and messages[0].role == 'system' else '') }}
        {{- message.content + '[/INST]' }}
    {%- else %}{{- message.content + '</s>' }}{%- endif %}
{%- endfor %}"""
GEMMA = """\
{{- '<bos>' }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{{- '<start_of_turn>model\\n' if add_generation_prompt }}"""
DEEPSEEK = """\
{{- '<｜begin▁of▁sentence｜>' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' if loop.first or loop.previtem.role != 'tool' }}{{- message.content }}
        {%- if message.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in message.tool_calls %}
                {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
                {{- (call.function.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁outputs▁begin｜>' if loop.previtem.role != 'tool' }}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
        {{- '<｜tool▁outputs▁end｜>' if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{{- '<｜Assistant｜>' if add_generation_prompt and messages[-1].role != 'tool' }}"""
GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with ' }}
    {{- 'function signatures within <tools></tools> XML tags:\\n<tools>\\n' }}
    {%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
    {{- '</tools>\\n\\nFor each function call, output the function name and arguments within the following XML format:\\n' }}
    {{- '<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>\\n' }}
    {{- '<arg_key>{arg-key-2}</arg_key>\\n<arg_value>{arg-value-2}</arg_value>\\n...\\n</tool_call>' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {{- '<|assistant|>\\n<think>' + (thought.strip() if loop.index0 > ns.last else '') + '</think>' }}
        {{- '\\n' + message.content.strip() if message.content.strip() }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>' if loop.previtem.role != 'tool' }}{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}{%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""


@dataclass(frozen=True)
class Format:
    """Chat format of one model family."""

    model_type: str
    template: str
    special: Sequence[str]
    """Added tokens that the tokenizer marks as special. The first is its end-of-sequence token."""
    plain: Sequence[str] = ()
    """Added tokens that are not marked as special."""
    tools: bool = True
    system: bool = True

    @property
    def added(self) -> list[str]:
        """All added tokens."""
        return [*self.special, *self.plain]


def deepseek_tokens() -> list[str]:
    names = [
        "tool▁sep",
        *(f"tool▁{part}▁{end}" for part in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
    ]
    return [f"<｜{name}｜>" for name in ("end▁of▁sentence", "begin▁of▁sentence", "User", "Assistant", *names)]


THINK = ("<think>", "</think>")
CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
HEADERS = (
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
)
GLM_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
FORMATS = {
    "qwen2.5": Format("qwen2", QWEN2_5, CHATML, HERMES),
    "qwen3": Format("qwen3", QWEN3, CHATML, (*HERMES, *THINK)),
    "llama3": Format("llama", LLAMA3, HEADERS),
    "mistral": Format("mistral", MISTRAL, ("</s>", "<s>", "[INST]", "[/INST]"), tools=False, system=False),
    "gemma": Format("gemma2", GEMMA, ("<end_of_turn>", "<bos>", "<start_of_turn>"), tools=False, system=False),
    "deepseek": Format("deepseek_v3", DEEPSEEK, tuple(deepseek_tokens()), THINK),
    "glm": Format("glm4_moe", GLM, GLM_TOKENS, (*HERMES, *THINK, *GLM_TAGS)),
}


@cache
def trained(chat: Format) -> str:
    """Return the JSON text of a byte-level BPE with fewer than 1,000 merges and the family's added tokens."""
    backend = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [file.read_text(encoding="utf-8") for file in sorted(TEXTS.glob("*.md"))]
    backend.train_from_iterator([*texts, chat.template], trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in chat.special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in chat.plain])
    return backend.to_str()


def make_tokenizer(chat: Format) -> PreTrainedTokenizerBase:
    """Return a new tokenizer of the family, of the text that `trained` returns."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained(chat)), eos_token=chat.special[0])
    tokenizer.chat_template = chat.template
    return tokenizer


def make_renderer(chat: Format, tokenizer: PreTrainedTokenizerBase, folder: Path) -> ChatRenderer:
    """Return the renderer that roll chooses for a model folder of this family."""
    (folder / "config.json").write_text(json.dumps({"model_type": chat.model_type}), encoding="utf-8")
    return chat_renderer(tokenizer, folder, "native")
