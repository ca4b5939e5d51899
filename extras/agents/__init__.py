"""Any program that calls the policy through an OpenAI endpoint, trained unchanged. docs/agents.md says how."""
