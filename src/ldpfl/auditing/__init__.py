"""Audits: a mechanism is run as it is, and what contradicts its claims is looked for."""

from ldpfl.auditing.audit import ERROR_RATE, MechanismAudit, audit_mechanism, default_trials
from ldpfl.auditing.checks import Check

__all__ = ["ERROR_RATE", "Check", "MechanismAudit", "audit_mechanism", "default_trials"]
