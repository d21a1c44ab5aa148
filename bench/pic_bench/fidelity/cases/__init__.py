"""The cases of every experiment: prompts with the requests that compute their donors, and the calls of a trace."""
