"""The stage `audit_data` as a KFP component."""
