"""Answers of the fake API server that are not objects: `Status` values."""

from typing import Any


class Refused(Exception):
    """An error answer: HTTP status, Kubernetes reason and message."""

    def __init__(self, code: int, reason: str, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.retry_after = code, reason, message, retry_after

    def status(self) -> dict[str, Any]:
        """The `Status` object of the answer."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }


def invalid(kind: str, name: str, problem: str) -> Refused:
    return Refused(422, "Invalid", f'{kind} "{name}" is invalid: {problem}')


def bad_request(message: str) -> Refused:
    return Refused(400, "BadRequest", message)


def not_found(plural: str, name: str) -> Refused:
    return Refused(404, "NotFound", f'{plural} "{name}" not found')


def conflict(plural: str, name: str, why: str) -> Refused:
    return Refused(409, "Conflict", f'Operation cannot be fulfilled on {plural} "{name}": {why}')
