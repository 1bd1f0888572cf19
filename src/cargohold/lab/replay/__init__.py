"""Replay: what a cache would have done for recorded traffic. Traces, replays on the production managers, sizing."""
