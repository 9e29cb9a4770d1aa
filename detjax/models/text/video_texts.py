"""Texts that take the place of videos in a prompt, for models whose chat templates write a text for a video."""

from collections.abc import Sequence
from typing import NamedTuple


class VideoTexts(NamedTuple):
    """The text that stands for a video, and the text of each video."""

    placeholder: str
    texts: Sequence[str]

    def put_into(self, prompt: str) -> str:
        """Returns the prompt with each placeholder replaced by the text of its video.

        Raises:
            ValueError: there are not as many placeholders as videos.
        """
        first, *rest = prompt.split(self.placeholder)
        if len(rest) != len(self.texts):
            raise ValueError(
                f"the prompt has {len(rest)} times the text {self.placeholder!r}; accepted: {len(self.texts)}, once "
                "for each video"
            )
        return first + "".join(text + part for text, part in zip(self.texts, rest, strict=True))
