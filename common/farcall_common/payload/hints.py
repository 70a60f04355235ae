"""Hints for exceptions of foreign code, and their messages."""

from __future__ import annotations


def message_of(error: BaseException) -> str:
    """The exception's text; ``str`` of a user's exception may fail."""
    try:
        return str(error)
    except BaseException as failure:  # noqa: BLE001 - user code may raise anything
        return f"(its text cannot be shown: {type(failure).__name__})"


def hint_for(error: BaseException) -> str:
    """Advice for errors whose usual cause is that the worker's machine is not the caller's; empty for others."""
    text = message_of(error)
    match error:
        case ModuleNotFoundError(name=str(name)):
            package = name.partition(".")[0]
            return (
                f"Install {package} on the endpoint, or, if it is your own module, call "
                f"cloudpickle.register_pickle_by_value({package}) before you submit."
            )
        case AttributeError() if "__main__" in text:
            return "A class or function of a script was sent by name; the default strategies send it by value."
        case ImportError():
            return "The endpoint has another version of this package; install the same version."
        case AttributeError() if text.startswith("Can't get attribute"):
            return "The endpoint has another version of this package; install the same version."
        case NameError(name=str(name)):
            return f"If {name} is defined outside the function, import or define it inside, or pass it as an argument."
        case MemoryError():
            return "Request more memory, or send the data in smaller pieces."
        case _:
            return ""
