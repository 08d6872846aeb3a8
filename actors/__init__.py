"""The actors: pure states, their thin shells, and the launch that makes Ray actors of them.

The driver (`polyneuron.engine`) owns the arena and starts everything (`launch`). It talks to the
`Coordinator` by msgpack descriptors (`messages`): a request in, its outcome out; tokens come back
through a mailbox in the arena. The coordinator asks the `CacheActor` what must be resident and has
the `IoActor` read it; it rings steps that the `CpuWorker`s and the `NpuExecutor` walk in C. Nothing
but commands of a request's size crosses Ray.
"""
