"""Policies: which chunks of a tier stay."""

from cargohold.cache.policies.base import Newcomers, ReplacementPolicy, RunsPolicy
from cargohold.cache.policies.registry import DEFAULT_POLICY, POLICIES, POLICY_NAMES, find_policy

__all__ = ["DEFAULT_POLICY", "POLICIES", "POLICY_NAMES", "Newcomers", "ReplacementPolicy", "RunsPolicy", "find_policy"]
