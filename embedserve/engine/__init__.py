"""The engine process: IpcLoop, EngineLoop and OutputLoop around the waiting room and the outbox."""
