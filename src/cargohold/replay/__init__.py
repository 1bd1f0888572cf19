"""What a cache would have done for recorded traffic: traces, replay on the production managers, sizing."""
