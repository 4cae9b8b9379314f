"""The operator's desk in the browser: all runs under some folders, requests with approval, and a JSON API.

`tokens` and `roles` say who may do what; `desk` is what can be done; `pages` and `json_api` are the two
ways to ask; `app` puts them together behind `security`. `sifu serve` starts it. Needs the extra `console`.
"""
