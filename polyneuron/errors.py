"""Every error a user can meet; each message names the file, field or flag and the cure."""


class PolyneuronError(Exception):
    """Base of all errors polyneuron raises on purpose; shown as one line, exit code 1."""


class ConfigError(PolyneuronError, ValueError):
    """A flag, field or environment that cannot be used; exit code 2."""


class FormatError(PolyneuronError, ValueError):
    """A model file that is not what it should be; names file and place; exit 2."""


class ChecksumError(FormatError):
    """Bytes of a model file that do not match their checksum."""


class UnsupportedError(FormatError):
    """A well-formed file that needs something polyneuron does not have; lists what it has."""


class ContextError(ConfigError):
    """A prompt that does not fit the context; carries both numbers."""


class ProtocolError(PolyneuronError):
    """An event that cannot happen in the present state."""


class DeviceError(PolyneuronError, OSError):
    """A read or a device operation that failed; carries errno."""


class EngineError(PolyneuronError):
    """The engine could not finish a request: an actor was lost or a step ran past its bound."""


class BackendError(PolyneuronError):
    """A back end of the NPU executor that failed; the native kernels go on in its place."""
