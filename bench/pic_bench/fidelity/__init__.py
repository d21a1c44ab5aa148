"""How far answers after splicing are from a full prefill: experiments through the real server, records, reports."""
