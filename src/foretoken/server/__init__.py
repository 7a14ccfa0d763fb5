"""OpenAI-compatible serving of one engine.

A request passes ``protocol`` (the connection), ``limits.Gate`` (id, key, size, a slot of ``slots``) and a route
(``completions``, ``chat``, ``messages``, ``responses``), whose body ``schemas`` or the API's own ``*_bodies`` has
validated.  ``turn.ChatTurn`` renders the prompt of a conversation (``templates``, ``call_formats``), ``inputs`` builds
the engine's requests, and ``running`` submits them.  ``answering.Answer``, the base of all these routes, counts and
logs the answer and returns it whole or through ``sse``.  ``call_reader`` finds tool calls in it. ``serving.Serving`` is
the shared state.
"""
