"""The pool's HTTP door: an OpenAI-compatible API over Starlette, a metrics page and a small web page.

A gateway holds no state that matters: any number of them may serve one pool, and one that dies loses no request.
"""
