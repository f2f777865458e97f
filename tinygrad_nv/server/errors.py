"""Error responses.

Protocol: every response that is not 2xx has the body {"error": {"message", "type", "param", "code"}}, which
OpenAI's clients turn into exceptions. `type` and `code` are vLLM's: the kind of error, and the HTTP status.
"Bad Request" is a body or field of the wrong form, "BadRequestError" a value that is not accepted. `reason`,
where there is one, tells programs more, and `param` is the invalid field. An `NVError` keeps its three parts
in the message. Responses of /v1/messages are
{"type": "error", "error": {"type", "message"}, "request_id"}, as Anthropic's clients read them, and those of
/api/ are {"error": message}, as Ollama's do.
"""
from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from tinygrad_nv.errors import EngineError, NVError, QueueFull, RequestError, TokenizerError

MESSAGES, OLLAMA = "/v1/messages", "/api/"
# of Anthropic's API
MESSAGE_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
                 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
# of vLLM's API; others are named by their status
TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError",
         503: "ServiceUnavailableError"}
# bodies and fields of another form
FORMS = ("invalid_json", "invalid_utf8", "wrong_type", "missing_field", "unsupported_media_type")


class APIError(Exception):
    """A response that is not 2xx: HTTP `status`, `message` for people, `code` for programs (the body's
    `reason`), the invalid `param`, extra `headers`."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, _encodable(message), code
        self.param = None if param is None else _encodable(param)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = None if self.code in FORMS else TYPES.get(self.status)
        return {"error": {"message": self.message, "type": kind or HTTPStatus(self.status).phrase,
                          "param": self.param, "code": self.status,
                          **({} if self.code is None else {"reason": self.code})}}

    def response(self, path: str = "", request_id: str = "") -> JSONResponse:
        """The response, in the shape of Anthropic's or Ollama's API for their paths."""
        body = self.message_body(request_id) if path.startswith(MESSAGES) else \
            self.ollama_body() if path.startswith(OLLAMA) else self.body()
        return JSONResponse(body, self.status, self.headers)

    def ollama_body(self) -> dict[str, Any]:
        """The JSON body in the shape of Ollama's API."""
        return {"error": self.message}

    def message_body(self, request_id: str) -> dict[str, Any]:
        """The JSON body in the shape of Anthropic's API."""
        kind = MESSAGE_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}


def _encodable(text: str) -> str:
    # messages repeat field names, and JSON can escape a lone surrogate
    return text.encode("utf-8", "backslashreplace").decode()


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """An invalid request: 400."""
    return APIError(400, message, code, param)


def internal() -> APIError:
    """An unexpected failure. Only the log has its details."""
    return APIError(500, "an internal error; the server's log has the details", "internal_error")


def api_error(error: NVError, param: str | None = None) -> APIError:
    """The response for an `NVError`: 429 when the queue is full, 400 for an invalid request, 503 when the
    engine has stopped, else 500."""
    parts = [error.found]
    if error.expected: parts.append(f"expected: {error.expected}")
    if error.fix: parts.append(f"to fix: {error.fix}")
    message = "; ".join(parts)
    if isinstance(error, QueueFull): return APIError(429, message, "queue_full", None, {"Retry-After": "1"})
    if isinstance(error, RequestError | TokenizerError): return invalid(message, param)
    return APIError(503 if isinstance(error, EngineError) else 500, message, "engine_error")
