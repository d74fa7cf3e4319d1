"""Why a raw sample is refused: one code and one sentence for each way to be unusable.

In: nothing. Out: the codes of the `quarantine` table and the exception that carries one.
"""

from __future__ import annotations

from diptych.core.errors import DataError

REASONS: dict[str, str] = {
    "malformed_json": "The line is not valid JSON.",
    "malformed_row": "The row is JSON, but not a conversation in LLaVA or ShareGPT form.",
    "duplicate_id": "Another row of the same source has this id.",
    "unknown_role": "A turn is neither the system's, nor the user's, nor the assistant's.",
    "turn_order": "Turns must alternate: user, assistant, and so on, ending with the assistant.",
    "no_answer": "No turn is the assistant's, so there is nothing to learn.",
    "empty_answer": "An answer has no text.",
    "empty_question": "A question has neither text nor image.",
    "placeholder_mismatch": "The number of <image> placeholders differs from that of images.",
    "kinds_mismatch": "`kinds` does not have one word per answer.",
    "path_escapes": "The image's path leaves the folder of images.",
    "missing_image": "The image is not there.",
    "truncated_image": "The image's file ends too early.",
    "unreadable_image": "The file is not an image in a format that is read.",
    "unsupported_pixels": "The kind of pixel has no defined conversion to 8-bit RGB.",
    "too_many_bytes": "The image's file is larger than `max_image_bytes`.",
    "too_many_pixels": "The header promises more pixels than `max_image_area_px`.",
    "too_small": "A side is shorter than `min_side_px`.",
    "extreme_aspect": "One side is more than `max_aspect` times the other.",
    "leaks_into_train": "The same held-out sample is in the training split.",
}


class Refused(DataError):
    """A sample or image that cannot be used; `reason` is a code of `REASONS`."""

    def __init__(
        self, reason: str, *, detail: str, value: str = "", image_path: str | None = None
    ) -> None:
        assert reason in REASONS, f"{reason} is not in REASONS"
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.value = value
        self.image_path = image_path
