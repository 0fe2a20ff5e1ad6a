"""Integrations of opdrift with other libraries; each module is loaded only when it is asked for."""
