"""Integrations of opdrift with other libraries; each module is loaded only when it is asked for.

pytest would rewrite the asserts of what brings a plugin: PYTEST_DONT_REWRITE.
"""
