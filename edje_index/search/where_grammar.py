"""Grammar of filter expressions, a subset of SQL, for the parser generator Lark.

The LALR parser takes linear time and does not use recursion.
"""

GRAMMAR = r"""
?start: disjunction
?disjunction: conjunction ("or"i conjunction)*
?conjunction: condition ("and"i condition)*
?condition: "not"i condition -> negation
    | operand COMPARISON operand -> comparison
    | operand "is"i "null"i -> is_null
    | operand "is"i "not"i "null"i -> is_not_null
    | operand "in"i "(" literal ("," literal)* ")" -> one_of
    | operand "not"i "in"i "(" literal ("," literal)* ")" -> none_of
    | operand "like"i text -> like
    | operand "not"i "like"i text -> not_like
    | operand -> truth
    | "(" disjunction ")"
?operand: NAME -> column
    | QUOTED_NAME -> quoted_column
    | literal
?literal: text
    | INTEGER -> integer
    | FRACTION -> fraction
    | "true"i -> true
    | "false"i -> false
text: TEXT

COMPARISON: "=" | "!=" | "<>" | "<=" | ">=" | "<" | ">"
NAME: /[^\W\d][\w.]*/i
QUOTED_NAME: /"(?:[^"]|"")+"/
TEXT: /'(?:[^']|'')*'/
FRACTION.2: /[+-]?(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?\d+[eE][+-]?\d+/
INTEGER: /[+-]?\d+/
%ignore /\s+/
"""
