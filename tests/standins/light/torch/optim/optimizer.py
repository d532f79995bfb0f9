"""A hook for steps that nobody makes."""


def register_optimizer_step_post_hook(hook: object) -> None:
    """Take a hook."""
