"""`restante completion`: print a shell completion script."""

from typing import Literal

from cyclopts import App, Group


def register(app: App, group: Group) -> None:
    """Add the command."""

    def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
        """
        Print a completion script for a shell.

        Example: restante completion bash > ~/.local/share/bash-completion/completions/restante

        Parameters
        ----------
        shell
            The shell. For zsh, save the output as _restante in a directory of your fpath; for fish,
            as ~/.config/fish/completions/restante.fish.
        """
        print(app.generate_completion(shell=shell))

    app.command(completion, group=group)
