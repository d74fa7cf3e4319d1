"""Why a raw sample is refused: one code and one sentence for each way to be unusable.

In: nothing. Out: the codes of the `quarantine` table and the exception that carries one.
"""

from __future__ import annotations

from diptych.core.addresses import without_secrets
from diptych.core.errors import DataError

REASONS: dict[str, str] = {
    "empty_part": "The file holds no sample.",
    "damaged_part": "The file cannot be read, or not from some place on.",
    "truncated_part": "The file ends in the middle of something; what came before is used.",
    "missing_column": "The table lacks a column that the source names.",
    "row_too_long": "The row is longer than 64 MB.",
    "malformed_json": "The text is not valid JSON.",
    "malformed_row": "The row is read, but not a conversation in a form that is understood.",
    "non_finite": "A number is infinite or not a number.",
    "unsafe_member": "The member is a link, a device, or its name leaves the folder.",
    "executable_member": "The member's format can run code when it is read; it never is.",
    "duplicate_member": "The sample has two members of one name.",
    "unused_member": "No sample takes this file or member.",
    "duplicate_id": "An earlier row of the same source has this id.",
    "unknown_role": "A turn is neither the system's, nor the user's, nor the assistant's.",
    "tools": "The conversation offers, calls or answers tools; none of that is learnt.",
    "turn_order": "Turns must alternate: user, assistant, and so on, ending with the assistant.",
    "no_answer": "No turn is the assistant's, so there is nothing to learn.",
    "empty_answer": "An answer has no text.",
    "empty_question": "A question has neither text nor image.",
    "placeholder_mismatch": "The number of <image> placeholders differs from that of images.",
    "placeholder_in_text": "A content part has <image> typed in its text.",
    "kinds_mismatch": "`kinds` does not have one word per answer.",
    "path_escapes": "The image's path leaves the folder of images.",
    "missing_image": "The image is not there.",
    "truncated_image": "The image's file ends too early.",
    "unreadable_image": "The file is not an image in a format that is read.",
    "unsupported_pixels": "The kind of pixel has no defined conversion to 8-bit RGB.",
    "too_much_text": "The row's messages have more bytes than `max_text_bytes`.",
    "too_many_bytes": "The image's file is larger than `max_image_bytes`.",
    "too_many_pixels": "The header promises more pixels than `max_image_area_px`.",
    "too_small": "A side is shorter than `min_side_px`.",
    "extreme_aspect": "One side is more than `max_aspect` times the other.",
    "duplicate_content": "An earlier sample has the same messages and images.",
    "leaks_into_train": "The same held-out sample is in the training split.",
    "image_leaks_into_train": "The held-out sample shares an image with the training split.",
}

UNCOUNTED = frozenset({"duplicate_content", "unused_member"})
"""Reasons that say nothing bad of the data: they don't count against `max_quarantined_fraction`."""


class Refused(DataError):
    """A sample or image that cannot be used; `reason` is a code of `REASONS`.

    Where an image is the reason, `image_path` is its name in the source, and the other attributes
    say where its bytes lie (see `data/sources/blobs.py`).
    """

    def __init__(
        self, reason: str, *, detail: str, value: str = "", image_path: str | None = None
    ) -> None:
        assert reason in REASONS, f"{reason} is not in REASONS"
        detail = without_secrets(detail)
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.value = without_secrets(value)
        self.image_path = None if image_path is None else without_secrets(image_path)
        self.image_file: str | None = None
        self.image_offset: int | None = None
        self.image_length: int | None = None
