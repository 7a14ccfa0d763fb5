"""OpenAI-compatible serving of one engine.

A request passes, in this order: ``protocol`` (the connection), ``limits.Gate`` (id, key, size, a place in ``places``),
a route (``completions``, ``chat``, ``messages``, ``responses``), whose body ``schemas`` or the API's own ``*_bodies``
has checked; ``turn.ChatTurn`` makes the prompt of a conversation (``templates``, ``call_formats``), ``inputs`` makes
the engine's requests, ``running`` hands them to the engine, and ``answering.Answer``, which all these routes are,
counts and logs what comes back, whole or through ``sse``.  ``call_reader`` finds calls of tools in it.
``serving.Serving`` is the state that all share.
"""
