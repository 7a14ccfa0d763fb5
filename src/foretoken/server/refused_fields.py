"""Fields of other servers that change an answer and that this one does not have, with what to do instead."""

from __future__ import annotations

REFUSED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "guided_json": "use structured_outputs or response_format",
    "guided_regex": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "audio": "only text is served",
    "web_search_options": "this server does not search the web",
    "prompt_embeds": "only text and token ids are served",
    "lora_request": "one model is served",
    "lora_path": "one model is served",
    "grammar": "use structured_outputs",
    "json_schema": "use response_format",
    "regex": "use structured_outputs",
    "ebnf": "use structured_outputs",
    "stop_regex": "use stop, with texts",
    "n_predict": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "truncate_prompt_tokens": "this server truncates no prompts",
    "documents": "use chat_template_kwargs.documents",
    "chat_template": "the server has the template: start it with --chat-template",
    "echo": "a chat has no prompt to repeat: use /v1/completions",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "custom_logit_processor": "use logit_bias, allowed_token_ids or bad_words",
    "typical_p": "use top_p, top_k or min_p",
    "xtc_probability": "use top_p, top_k or min_p",
    "mirostat": "use top_p, top_k or min_p",
    "dry_multiplier": "use repetition_penalty or frequency_penalty",
    "use_beam_search": "beam search is not supported",
    "length_penalty": "beam search is not supported",
}
"""Fields with a meaning elsewhere: a request that relies on them must not get a different answer instead."""
REFUSED_FORMS = {
    "structural_tag": "use json, regex, grammar or choice",
    "whitespace_pattern": "JSON is written as by json.dumps",
    "disable_any_whitespace": "JSON is written as by json.dumps",
    "disable_additional_properties": 'say "additionalProperties": false in the schema',
}
"""The same for fields of ``structured_outputs``."""
OFF = {"typical_p": 1, "length_penalty": 1}
"""Values, beside empty ones, by which such a field has no effect."""
