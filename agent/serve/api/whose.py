"""Who may see what of others, and whose words enter figures that everybody sees. Decisions only."""

from __future__ import annotations

from dataclasses import dataclass

from agent.serve.owner_config import EventsConfig, FiguresConfig

_ADMIN = "admin"


@dataclass(frozen=True)
class Owner:
    """Whose a response is: the name of a key, and the user that its holder named ("": none)."""

    key: str
    user: str = ""


@dataclass(frozen=True)
class Viewer:
    """Who watches the events. `user` None: the caller named nobody."""

    key: str
    user: str | None
    rules: EventsConfig

    def sees(self, owner: Owner) -> bool:
        """Whether the details of what `owner` did are shown, and not only what they do to the figures.

        A name narrows what its key sees. Without one nothing is shown by default: this stream is for screens that many
        look at with one key, and a response's id is enough to judge, read and delete it.
        """
        if self.rules.admins_see_all and self.key.startswith(_ADMIN):
            return True
        if self.key != owner.key or self.rules.details == "none":
            return False
        return self.rules.details == "key" if self.user is None else self.user == owner.user


def trusts(rules: FiguresConfig, key: str) -> bool:
    """Whether the metadata of feedback that came with `key` counts for everybody's figures."""
    return key.startswith(_ADMIN) or bool({key, "*"} & set(rules.from_metadata))
