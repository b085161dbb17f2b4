variable "name" {
  type        = string
  description = "Prefix of all names."
}

variable "fleets" {
  type        = list(string)
  description = "Fleets that the flow role may act for."
}

variable "bucket_arn" {
  type        = string
  description = "The store."
}

variable "key_arn" {
  type        = string
  description = "The store's key."
}

variable "agent_secret_arn" {
  type        = string
  description = "The secret that node agents read."
}

variable "database_user_arn" {
  type        = string
  description = "The secret with Prefect's database user."
}

variable "regions" {
  type        = list(string)
  description = "Where nodes may be rented."
}

variable "launch_template" {
  type        = string
  description = "Name of the only launch template that may be used."
}

data "aws_caller_identity" "this" {}

locals {
  account = data.aws_caller_identity.this.account_id
  ec2     = "arn:aws:ec2:*:${local.account}"
}

data "aws_iam_policy_document" "ec2_assumes" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

# ---- Nodes: read weights, read their keys, be reachable through Systems Manager. Nothing in EC2.
resource "aws_iam_role" "node" {
  name               = "${var.name}-node"
  assume_role_policy = data.aws_iam_policy_document.ec2_assumes.json
}

resource "aws_iam_instance_profile" "node" {
  name = "${var.name}-node"
  role = aws_iam_role.node.name
}

data "aws_iam_policy_document" "node" {
  statement {
    sid       = "ReadWeights"
    actions   = ["s3:GetObject"]
    resources = ["${var.bucket_arn}/weights/*"]
  }
  statement {
    sid       = "ListWeights"
    actions   = ["s3:ListBucket"]
    resources = [var.bucket_arn]
    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = ["weights/*"]
    }
  }
  statement {
    sid       = "ReadKeys"
    actions   = ["secretsmanager:GetSecretValue"]
    resources = [var.agent_secret_arn]
  }
  statement {
    sid       = "Decrypt"
    actions   = ["kms:Decrypt"]
    resources = [var.key_arn]
  }
}

resource "aws_iam_role_policy" "node" {
  name   = "weights-and-keys"
  role   = aws_iam_role.node.id
  policy = data.aws_iam_policy_document.node.json
}

resource "aws_iam_role_policy_attachment" "session_manager" {
  for_each   = { node = aws_iam_role.node.name, flow = aws_iam_role.flow.name }
  role       = each.value
  policy_arn = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
}

# ---- Flows: the store, the questions that observe asks, and starting and ending the fleets' own nodes.
resource "aws_iam_role" "flow" {
  name               = "${var.name}-flow"
  assume_role_policy = data.aws_iam_policy_document.ec2_assumes.json
}

resource "aws_iam_instance_profile" "flow" {
  name = "${var.name}-flow"
  role = aws_iam_role.flow.name
}

data "aws_iam_policy_document" "store" {
  statement {
    sid       = "Objects"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
    resources = ["${var.bucket_arn}/coral/*"]
  }
  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"]
    resources = [var.bucket_arn]
  }
  statement {
    sid       = "Key"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = [var.key_arn]
  }
  statement {
    sid       = "DatabaseUser"
    actions   = ["secretsmanager:GetSecretValue"]
    resources = [var.database_user_arn]
  }
}

# These actions take no resource: AWS defines none for them.
data "aws_iam_policy_document" "observe" {
  statement {
    sid = "Ask"
    actions = [
      "ec2:DescribeInstances",
      "ec2:DescribeInstanceTypeOfferings",
      "ec2:DescribeInstanceTypes",
      "ec2:DescribePlacementGroups",
      "ec2:DescribeRegions",
      "ec2:DescribeSpotInstanceRequests",
      "ec2:DescribeSpotPriceHistory",
      "pricing:GetProducts",
      "servicequotas:ListServiceQuotas",
    ]
    resources = ["*"]
  }
}

data "aws_iam_policy_document" "fleet" {
  # A new instance must carry a fleet's tag and come from our launch template, which fixes role, image and network.
  statement {
    sid       = "StartTagged"
    actions   = ["ec2:RunInstances"]
    resources = [for kind in ["instance", "volume", "network-interface", "spot-instances-request"] : "${local.ec2}:${kind}/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/coral:fleet"
      values   = var.fleets
    }
    condition {
      test     = "StringEquals"
      variable = "aws:RequestedRegion"
      values   = var.regions
    }
  }
  # Image and security groups: only as the launch template has them.
  statement {
    sid       = "AsInTheTemplate"
    actions   = ["ec2:RunInstances"]
    resources = ["arn:aws:ec2:*::image/*", "${local.ec2}:security-group/*"]
    condition {
      test     = "Bool"
      variable = "ec2:IsLaunchTemplateResource"
      values   = ["true"]
    }
  }
  statement {
    sid       = "Where"
    actions   = ["ec2:RunInstances"]
    resources = ["${local.ec2}:subnet/*", "${local.ec2}:placement-group/coral-*"]
  }
  statement {
    sid       = "FromOurTemplate"
    actions   = ["ec2:RunInstances"]
    resources = ["${local.ec2}:launch-template/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/coral:launch-template"
      values   = [var.launch_template]
    }
  }
  statement {
    sid       = "EndOurs"
    actions   = ["ec2:TerminateInstances"]
    resources = ["${local.ec2}:instance/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/coral:fleet"
      values   = var.fleets
    }
  }
  statement {
    sid       = "Group"
    actions   = ["ec2:CreatePlacementGroup"]
    resources = ["${local.ec2}:placement-group/coral-*"]
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/coral:fleet"
      values   = var.fleets
    }
  }
  statement {
    sid       = "Ungroup"
    actions   = ["ec2:DeletePlacementGroup"]
    resources = ["${local.ec2}:placement-group/coral-*"]
    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/coral:fleet"
      values   = var.fleets
    }
  }
  # Tags only at birth: nothing that exists can be made ours later.
  statement {
    sid       = "TagAtBirth"
    actions   = ["ec2:CreateTags"]
    resources = ["${local.ec2}:*/*"]
    condition {
      test     = "StringEquals"
      variable = "ec2:CreateAction"
      values   = ["RunInstances", "CreatePlacementGroup"]
    }
  }
  statement {
    sid       = "GiveNodesTheirRole"
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.node.arn]
    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role_policy" "flow" {
  for_each = {
    store   = data.aws_iam_policy_document.store.json
    observe = data.aws_iam_policy_document.observe.json
    fleet   = data.aws_iam_policy_document.fleet.json
  }
  name   = each.key
  role   = aws_iam_role.flow.id
  policy = each.value
}

# EC2 asks for this role before the first spot instance of an account.
resource "aws_iam_service_linked_role" "spot" {
  count            = length(data.aws_iam_roles.spot.names) == 0 ? 1 : 0
  aws_service_name = "spot.amazonaws.com"
}

data "aws_iam_roles" "spot" {
  name_regex = "^AWSServiceRoleForEC2Spot$"
}

output "node_profile_arn" {
  value = aws_iam_instance_profile.node.arn
}

output "flow_profile" {
  value = aws_iam_instance_profile.flow.name
}
