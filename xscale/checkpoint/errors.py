"""What can go wrong with a checkpoint: saving fails (training may go on), or what lies there is damaged."""

from xscale.core.errors import FaultError


class CheckpointError(FaultError):
    """A checkpoint could not be written or read; raised alike on every rank. Says where, what, and what would work."""

    def __init__(self, path: object, what: str, fix: str = "") -> None:
        self.path, self.what, self.fix = str(path), what, fix
        super().__init__(f"{path}: {what}. {fix}".rstrip() if fix else f"{path}: {what}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.path, self.what, self.fix)


class DamageError(CheckpointError):
    """A checkpoint that lies there is not what was written: a file is missing, cut short or changed."""

    def __init__(self, path: object, what: str, fix: str = "", label: str = "damaged") -> None:
        super().__init__(path, what, fix)
        self.label = label
        """One word for the folder's name when it is set aside: missing, size, hash, manifest."""

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:  # type: ignore[override]
        return type(self), (self.path, self.what, self.fix, self.label)
